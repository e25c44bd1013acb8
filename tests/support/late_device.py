"""A GPU made of CPU tensors that does its work as late as the host allows, or in any other order
that its streams allow.

Every operation on its tensors, copy, kernel and replayed graph is queued on the current stream, and
done when the host waits for an event behind it, or before, as `earliness` and a seed have it. What
must not be relied on holds other numbers meanwhile: new memory, results of work that is not done,
and memory whose owner is gone, from where its stream could give it to the next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
POISON = -7  # in integers; no token, no padding
NOT_A_NUMBER = 0x7F  # in e4m3
PAGE = 512  # bytes that memory is given out in
IS_CAPTURING = "CUDA error: operation not permitted when stream is capturing"
FACTORIES = ("aten::empty", "aten::new_empty")  # of what no work writes


_metas: dict[Any, Any] = {}  # results without numbers, by operation and sizes of its arguments


def poison(tensor: Tensor) -> None:
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(NOT_A_NUMBER)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype not in (torch.bool, torch.uint8):
        tensor.fill_(POISON)


@dataclass(eq=False)
class Point:
    """A moment of a queue, which comes once what was queued before is done."""

    queue: deque[Any] | None = None
    graph: Graph | None = None  # that was being captured
    is_done: bool = False
    time: int = 0


class Record(NamedTuple):
    point: Point


class Wait(NamedTuple):
    point: Point


@dataclass(eq=False)
class Replay:
    """A graph on its way: the queues of its streams."""

    queues: list[deque[Any]]


@dataclass(eq=False)
class Graph:
    """What was captured, by stream, the first of which it began on."""

    device: LateDevice
    items: dict[Stream, list[Any]] = field(default_factory=dict)
    error: str | None = None

    def capture_begin(self, pool: object = None, **settings: object) -> None:
        self.items = {self.device.stream: []}
        self.device.capture = self

    def capture_end(self) -> None:
        self.device.capture = None
        if self.device.fails_capture:
            self.error = "CUDA error: operation would make the legacy stream depend on a capture"
        first, *others = self.items.values()
        joined = {item.point for item in first if isinstance(item, Wait)}
        if not all(isinstance(items[-1], Record) and items[-1].point in joined for items in others):
            self.error = "CUDA error: capturing stream has unjoined work"
        if self.error:
            self.items = {}
            raise RuntimeError(self.error)

    def replay(self) -> None:
        points: defaultdict[Point, Point] = defaultdict(Point)
        queues = [
            deque(
                type(item)(points[item.point]) if isinstance(item, (Record, Wait)) else item
                for item in items
            )
            for items in self.items.values()
        ]
        self.device.queue(Replay(queues))


class Stream:
    """As torch.cuda.Stream, of the device that is in use."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[Any] = deque()
        device.streams.append(self)

    def record_event(self) -> Point:
        point = Point(self.queue, self.device.capturing(self))
        self.device.queue(Record(point), self)
        return point

    def wait_event(self, point: Point) -> None:
        if point.graph is not None and point.graph is self.device.capture:
            point.graph.items.setdefault(self, [])
        elif self.device.capturing(self):
            raise self.device.refused("CUDA error: dependency created on uncaptured work")
        self.device.queue(Wait(point), self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.wait(self.record_event())


class Block:
    """Memory of the device: its owner's, until that is gone."""

    num_bytes = 0

    def __init__(self, device: LateDevice, like: Tensor) -> None:
        self.device, self.stream, self.graph = device, device.stream, device.capture
        num_bytes = -(-like.nbytes // PAGE) * PAGE
        device.take(num_bytes)
        self.num_bytes = num_bytes
        self.inner = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        poison(self.inner)

    def __del__(self) -> None:
        if self.num_bytes:
            self.device.give(self)


class LateTensor(Tensor):
    """A tensor of the device. What it holds when all work is done is in the CPU's `inner`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block) -> LateTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",  # torch built without CUDA has no guard for its devices
        )
        made.inner, made.block = inner, block
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number goes as a tensor: torch would make that on the device that it sees."""
        is_number = isinstance(value, (int, float))
        super().__setitem__(index, self.new_empty(()).fill_(value) if is_number else value)

    def tolist(self) -> list[Any]:
        return self.to("cpu").tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = next(arg for arg in flat(args, kwargs or {}) if isinstance(arg, LateTensor))
        return late.block.device.call(func, args, kwargs or {})


class Kind(NamedTuple):
    """What an operation does with its arguments."""

    is_composite_view: bool
    is_view: bool
    written: list[tuple[int, str]]  # arguments that it returns, by place and name
    writes: bool


@cache
def kind_of(func: Any) -> Kind:
    schema = func._schema
    returned = [one.alias_info for one in schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    of_composite = torch._C._dispatch_has_kernel_for_dispatch_key
    written = [
        (place, argument.name)
        for alias in returned
        if alias is not None and alias.is_write
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.before_set == alias.before_set
    ]
    return Kind(
        is_view and of_composite(func.name(), "CompositeImplicitAutograd"),
        is_view,
        written,
        any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments),
    )


def flat(args: Any, kwargs: Any) -> Any:
    for arg in chain(args, kwargs.values()):
        if isinstance(arg, (list, tuple)):
            yield from arg
        else:
            yield arg


def mapped(change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    def one(arg: Any) -> Any:
        return type(arg)(map(change, arg)) if type(arg) in (list, tuple) else change(arg)

    return [one(arg) for arg in args], {name: one(arg) for name, arg in kwargs.items()}


class LateDevice(TorchDispatchMode):
    """While entered, what is made on "cuda" is this device's.

    After each piece of work it goes on by some, as long as a draw is below `earliness`: with 0 it
    does only what it is waited for, with 1 all at once. `fail_at` is the number of the allocation
    (from 1) that finds no memory; `allocated` is called at each.
    """

    def __init__(self, seed: int = 0, earliness: float = 0.0, num_bytes: int = 8 << 30) -> None:
        super().__init__()
        self.earliness, self.num_bytes = earliness, num_bytes
        self.random = Random(seed)
        self.streams: list[Stream] = []
        self.stream = self.default_stream = Stream(self)
        self.capture: Graph | None = None
        self.clock = 0
        self.taken = self.most_taken = self.num_allocations = 0
        self.fail_at: int | None = None
        self.allocated: Callable[[], object] = lambda: None
        self.fails_capture, self.has_room_in_captures = False, True
        self._pinned: dict[int, Tensor] = {}  # by the address of what must not move

    def graph(self) -> Graph:
        return Graph(self)

    # -- order -------------------------------------------------------------------------------------

    def capturing(self, stream: Stream) -> Graph | None:
        graph = self.capture
        return graph if graph is not None and stream in graph.items else None

    def queue(self, item: Any, stream: Stream | None = None) -> None:
        stream = stream or self.stream
        if (graph := self.capturing(stream)) is not None:
            graph.items[stream].append(item)
            return
        stream.queue.append(item)
        while self.random.random() < self.earliness and (ready := self._ready()):
            with torch._C._DisableTorchDispatch():
                self._step(self.random.choice(ready))

    def _ready(self) -> list[deque[Any]]:
        return [stream.queue for stream in self.streams if _is_ready(stream.queue)]

    def wait(self, point: Point) -> None:
        """Let the host wait for `point`."""
        if self.capture is not None:
            raise self.refused(IS_CAPTURING)
        with torch._C._DisableTorchDispatch():
            while not point.is_done:
                queue = self.random.choice(self._ready()) if self.earliness else point.queue
                while not _is_ready(queue):
                    queue = queue[0].point.queue
                self._step(queue)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def refused(self, words: str) -> RuntimeError:
        """What CUDA says of something that breaks the capture."""
        if self.capture is not None:
            self.capture.error = (
                "CUDA error: operation failed due to a previous error during capture"
            )
        return RuntimeError(words)

    def _step(self, queue: deque[Any]) -> None:
        item = queue[0]
        if isinstance(item, Replay):
            ready = [inner for inner in item.queues if _is_ready(inner)]
            if ready:
                self._step(self.random.choice(ready))
                return
        queue.popleft()
        if isinstance(item, Record):
            item.point.is_done, item.point.time = True, self.clock
        elif callable(item):
            self.clock += 1
            item()

    # -- memory ------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> None:
        self.num_allocations += 1
        self.allocated()
        is_full = self.capture is not None and not self.has_room_in_captures
        if (
            self.num_allocations == self.fail_at
            or is_full
            or self.taken + num_bytes > self.num_bytes
        ):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. GPU 0 has a "
                f"total capacity of {self.num_bytes / 2**30:.2f} GiB of which 0 bytes is free."
            )
        self.taken += num_bytes
        self.most_taken = max(self.most_taken, self.taken)

    def give(self, block: Block) -> None:
        """Take back the memory of an owner that is gone; in its stream's order it is another's."""
        self.taken -= block.num_bytes
        inner, graph = block.inner, block.graph
        queue = block.stream.queue if graph is None else graph.items.get(block.stream)
        if queue is not None and (graph is None or graph is self.capture):
            queue.append(lambda: poison(inner))

    def empty(self, like: Tensor) -> LateTensor:
        """New memory of the sizes of `like`, on whatever device that is."""
        block = Block(self, like)
        return LateTensor(block.inner, block)

    def pinned(self, like: Tensor) -> Tensor:
        self.num_allocations += 1
        self.allocated()
        if self.num_allocations == self.fail_at:
            raise RuntimeError("CUDA error: out of memory")
        made = torch.empty_like(like, device="cpu")
        poison(made)
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._pinned

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for seconds

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_late = any(isinstance(arg, LateTensor) for arg in flat(args, kwargs))
        to = kwargs.get("device")
        is_pinned = kwargs.get("pin_memory") or func.name() in PINNING
        names = is_pinned or any(isinstance(a, torch.device) and a.type == "cuda" for a in args)
        if is_late or names or (to is not None and torch.device(to).type == "cuda"):
            return self.call(func, args, kwargs)
        return func(*args, **kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what needs no numbers, and queue the rest."""
        name, kind = func.name(), kind_of(func)
        if kind.is_composite_view:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, *args, **kwargs)
        if name == "aten::_has_compatible_shallow_copy_type":
            return False
        if name in PINNING:
            return self.is_pinned(args[0]) if name == "aten::is_pinned" else self._pin(args[0])
        if kwargs.get("pin_memory"):
            return self.pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if not any(isinstance(arg, LateTensor) for arg in flat(args, kwargs)) or (
            name.startswith(FACTORIES)
        ):
            return self._made(func, args, kwargs)
        if kind.is_view:
            return self._viewed(func, args, kwargs)
        if not name.startswith("aten::index") and any(map(_is_on_host, flat(args, kwargs))):
            raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
        inner_args, inner_kwargs = mapped(self._at_hand, args, kwargs)
        inner_kwargs.pop("device", None)
        if kind.writes:
            self.queue(lambda: func(*inner_args, **inner_kwargs))
            return self._written(kind, args, kwargs)
        return self._computed(func, args, kwargs, inner_args, inner_kwargs)

    def _at_hand(self, value: Any) -> Any:
        """An argument as the work will read it. A number on the host is passed with the launch."""
        is_on_host = isinstance(value, Tensor) and not isinstance(value, LateTensor)
        assert not (is_on_host and value.is_meta), "made where torch saw this device as meta"
        return value.clone() if is_on_host else _inner(value)

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        late = next(arg for arg in flat(args, kwargs) if isinstance(arg, LateTensor))
        inner_args, inner_kwargs = mapped(self._at_hand, args, kwargs)
        viewed = func(*inner_args, **inner_kwargs)
        if isinstance(viewed, Tensor):
            return LateTensor(viewed, late.block)
        return [LateTensor(one, late.block) for one in viewed]

    def _written(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        found = [kwargs[name] if name in kwargs else args[i] for i, name in kind.written]
        return tuple(found) if len(found) > 1 else found[0] if found else None

    def _made(self, func: Any, args: Any, kwargs: Any) -> LateTensor:
        """A tensor by nothing but its size and a rule."""
        args, kwargs = mapped(_inner, args, kwargs)
        args, kwargs = mapped(_off_device, args, kwargs)
        kwargs.setdefault("device", "cpu")
        if func.name().startswith(FACTORIES):
            return self.empty(func(*args, **{**kwargs, "device": "meta"}))
        found = func(*args, **kwargs)
        made = self.empty(found)
        inner = made.inner
        self.queue(lambda: inner.copy_(found))
        return made

    def _computed(
        self, func: Any, args: Any, kwargs: Any, inner_args: Any, inner_kwargs: Any
    ) -> Any:
        try:
            metas = self._metas_of(func, inner_args, inner_kwargs)
        except (RuntimeError, NotImplementedError):  # sizes, or a number, depend on the tensors'
            if self.capture is not None:
                raise self.refused(IS_CAPTURING) from None
            self.stream.synchronize()
            found = func(*inner_args, **inner_kwargs)
            if not isinstance(found, Tensor):
                return found
            made = self.empty(found)
            made.inner.copy_(found)
            return made
        is_one = isinstance(metas, Tensor)
        made = [self.empty(meta) for meta in ([metas] if is_one else metas)]
        into = [one.inner for one in made]

        def work() -> None:
            found = func(*inner_args, **inner_kwargs)
            for target, source in zip(into, [found] if is_one else found, strict=True):
                target.copy_(source)

        self.queue(work)
        return made[0] if is_one else tuple(made)

    def _metas_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results without their numbers, worked out once for arguments of the same sizes."""
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in _metas:
            on_meta = mapped(lambda a: a.to("meta") if isinstance(a, Tensor) else a, args, kwargs)
            _metas[key] = func(*on_meta[0], **on_meta[1])
            if not isinstance(_metas[key], (Tensor, tuple, list)):
                raise NotImplementedError
        return _metas[key]

    # -- copies ------------------------------------------------------------------------------------

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        on_host = [one for one in (to, source) if not isinstance(one, LateTensor)]
        is_pinned = all(map(self.is_pinned, on_host))
        if on_host and self.capture is not None and not (is_pinned and non_blocking):
            raise self.refused(IS_CAPTURING)
        target = _inner(to)
        read = _inner(source)
        if on_host and on_host[0] is source and not is_pinned:
            read = read.clone()  # staged before the call returns
        self.queue(lambda: target.copy_(read))
        if on_host and (not non_blocking or (on_host[0] is to and not is_pinned)):
            self.stream.synchronize()
        return to

    def _to_copy(self, func: Any, source: Tensor, **kwargs: Any) -> Tensor:
        to = torch.device(kwargs.pop("device", None) or source.device)
        if isinstance(source, LateTensor) and to.type == "meta":
            to = DEVICE  # as the rest of torch sees it
        non_blocking = kwargs.pop("non_blocking", False)
        kwargs.pop("pin_memory", None)
        meta = func(
            source.inner if isinstance(source, LateTensor) else source, device="meta", **kwargs
        )
        made = self.empty(meta) if to.type == "cuda" else torch.empty_like(meta, device="cpu")
        return self._copy(made, source, non_blocking)

    def _pin(self, source: Tensor) -> Tensor:
        return self.pinned(source).copy_(source)


class LaunchQueue:
    """Takes launches of kernels, as `recorded` keeps them, for `device`."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def append(self, launch: Any) -> None:
        args, _ = mapped(_inner, launch.arguments, {})
        kernel, options = launch.kernel[launch.grid], launch.options
        self._device.queue(lambda: kernel(*args, **options))


PINNING = ("aten::pin_memory", "aten::_pin_memory", "aten::is_pinned")


def _is_ready(queue: deque[Any]) -> bool:
    if not queue:
        return False
    item = queue[0]
    if isinstance(item, Replay):
        return not any(item.queues) or any(map(_is_ready, item.queues))
    return not isinstance(item, Wait) or item.point.is_done


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, LateTensor) else value


def _is_on_host(value: Any) -> bool:
    """Whether it is a tensor that work on the device can't take: a number is passed with it."""
    return isinstance(value, Tensor) and value.ndim > 0 and not isinstance(value, LateTensor)


def _off_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value
