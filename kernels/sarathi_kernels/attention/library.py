"""Optional libraries of attention kernels: what they take, and their errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from sarathi_kernels.runtime.chip import Chip

DTYPES = (torch.float16, torch.bfloat16)


class LibraryError(RuntimeError):
    """A library's failure to compile or to launch a kernel."""


@dataclass(frozen=True)
class Library:
    """An object `name` of a `module`, installed from `source`, for caches in 16 bits."""

    title: str
    module: str
    name: str
    source: str
    head_sizes: tuple[int, ...]
    capabilities: range  # see Chip

    def load(self) -> Any:
        """Import the object. Raises ImportError with a reason."""
        try:
            return getattr(import_module(self.module), self.name)
        except ModuleNotFoundError as error:
            reason = f"{error.name} is not installed"
        except AttributeError:
            reason = f"the installed {self.module} has no {self.name}"
        except Exception as error:  # of its libraries for CUDA
            reason = f"{self.module} can't be imported ({_line(error)})"
        raise ImportError(f"{reason} ({self.source})")

    def why_not(self, spec: Any, dtype: torch.dtype, block_size: int, chip: Chip) -> str | None:
        """Return why it does not take a model's heads or cache, of blocks of any size; None if it
        does.
        """
        if spec.kv_dtype != "auto":
            return f"{self.title} takes no cache in {spec.kv_dtype} with a scale for each head"
        if dtype not in DTYPES:
            return f"{self.title} takes float16 and bfloat16, not {str(dtype).split('.')[-1]}"
        if spec.head_size not in self.head_sizes:
            return f"{self.title} is for heads of {self.head_sizes}, not {spec.head_size}"
        if chip.capability not in self.capabilities:
            return f"{self.title} is not for a GPU of sm_{chip.capability}"
        try:
            self.load()
        except ImportError as error:
            return str(error)
        return None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error that is not of memory into a LibraryError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise LibraryError(f"{self.title}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
