"""Commands of servers in descriptions of containers: of Kubernetes, compose, Helm, KServe, Ray,
dstack and SkyPilot, in Dockerfiles and in units of Podman's Quadlet.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import yaml

from sarathi_lab.extensions.replay.server_arguments import as_object, find
from sarathi_lab.extensions.replay.server_programs import (
    ENTRYPOINT_FLAG,
    PREFILL,
    PROGRAMS,
    REPLICAS,
    VARIABLES_FILES,
    starts_server,
)
from sarathi_lab.extensions.replay.shell import (
    CONTINUED,
    ShellCommand,
    commands_in,
    split,
    substituted,
)

# Keys of YAML whose value is a script, or several: of dstack, and of SkyPilot.
SCRIPT_KEYS = ("commands", "run")
HELM_KEY = "vllmConfig"
CHART_KEY = "vllm"  # under which charts of their own have a server, its arguments in camel case
MODEL_KEYS = ("modelURL", "model", "modelId")  # of a chart
EXTRA_KEY = "extraArgs"
RAY_KEY = "engine_kwargs"  # of Ray's objects, beside what names a model
# Of KServe: formats of models that its runtime serves with vLLM, and a variable with arguments.
FORMATS_OF_VLLM = ("vLLM", "huggingface")
# Flags of its server for models of Hugging Face, which hands all others to vLLM.
FLAGS_OF_KSERVE = {"--model_name": "--served-model-name", "--model_id": "--model"}
FLAGS_OF_KSERVE |= {"--model_dir": "--model"}
# Keys of containers by those of compose: as `docker inspect` shows one, and as RunPod is asked.
KEYS_OF_DOCKER = {"Image": "image", "Entrypoint": "entrypoint", "Cmd": "command"}
KEYS_OF_DOCKER |= {"Env": "environment"}
KEYS_OF_RUNPOD = {"imageName": "image", "dockerArgs": "command"}
ADDITIONAL_ARGS, HUB = "VLLM_ADDITIONAL_ARGS", "hf://"
DOCKERFILE = re.compile(r"^[ \t]*FROM[ \t]+\S+", re.MULTILINE)
INSTRUCTION = re.compile(r"^[ \t]*(FROM|ARG|ENV|ENTRYPOINT|CMD)[ \t]+(.*)$", re.MULTILINE)
# A line of a unit of systemd's, of which Podman's Quadlet describes a container.
UNIT_LINE = re.compile(r"^(Image|Exec|Entrypoint|Environment|EnvironmentFile)=(.*)$", re.MULTILINE)


def containers_in(text: str) -> list[ShellCommand]:
    """Return the commands of the containers that YAML or JSON describes."""
    try:
        documents = [json.loads(text)]  # many times faster than as YAML
    except ValueError:
        try:
            documents = list(yaml.safe_load_all(text))
        except yaml.YAMLError:
            return []
    return [command for document in documents for command in containers_of(document, 1)]


def containers_of(content: object, replicas: int) -> Iterator[ShellCommand]:
    """Yield the commands of the containers in a part of a description, of which there are so many
    `replicas` unless it says otherwise.
    """
    if isinstance(content, list):
        for entry in content:
            yield from containers_of(entry, replicas)
    if not isinstance(content, Mapping):
        return
    content = _as_container(content)
    replicas = _replicas_of(content, replicas)
    marks = [f"{REPLICAS}{replicas}"] if replicas > 1 else []
    arguments = content.get(HELM_KEY)
    if isinstance(arguments, Mapping):
        argv = [*marks, _image_of(content), "vllm", "serve"]
        yield ShellCommand([*argv, *_argv_of_chart(content, arguments)])
        return
    chart = as_object(content.get(CHART_KEY))
    if _model_of_chart(chart):
        image = _image_of(chart) or _image_of(content)
        yield ShellCommand([*marks, image, "vllm", "serve", *_argv_of_chart(chart, chart)])
        return
    if isinstance(content.get(RAY_KEY), Mapping):
        yield ShellCommand([*marks, *_argv_of_ray(content)])
        return
    if content.get("kind") == "LLMInferenceService":
        yield _of_llm_service(as_object(content.get("spec")))
        return
    if as_object(content.get("modelFormat")).get("name") in FORMATS_OF_VLLM:
        argv = ["vllm", "serve", *_argv_of_kserve(content)]
        yield ShellCommand([*marks, *argv], _variables_of(content.get("env")))
        return
    if any(_argv_of(content.get(key)) for key in ("command", "args", "entrypoint")):
        argv = [name for name in VARIABLES_FILES if content.get(name)]
        argv += marks
        program = _program_of(content)
        if program:
            argv.append(f"{ENTRYPOINT_FLAG}={program}")
        argv.append(_image_of(content))
        for key in ("entrypoint", "command", "args"):
            argv += _argv_of(content.get(key))
        variables = _variables_of(content.get("env")) | _variables_of(content.get("environment"))
        yield ShellCommand(argv, variables)
        return
    variables = _variables_of(content.get("env")) | _variables_of(content.get("envs"))
    image = _image_of(content)
    for key in SCRIPT_KEYS:
        script = content.get(key)
        if isinstance(script, list):
            script = "\n".join(map(str, script))
        if isinstance(script, str):
            for command in commands_in(script, variables, PROGRAMS):
                if starts_server(command.argv):
                    yield ShellCommand([*marks, image, *command.argv], command.variables)
    for key, value in content.items():
        if key == "values" and isinstance(value, str):  # a chart's, as Argo CD has them
            yield from containers_in(value)
        else:
            yield from containers_of(value, replicas)


def _as_container(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return an object by the keys of compose, where it describes a container by Docker's or
    RunPod's.
    """
    for keys in (KEYS_OF_DOCKER, KEYS_OF_RUNPOD):
        if all(key in content for key in keys):
            return {name: content[key] for key, name in keys.items()}
    return content


def _image_of(content: Mapping[str, object]) -> str:
    """Return a container's image, which charts of Helm have in several fields."""
    image = content.get("image")
    if isinstance(image, str):
        return image
    fields = as_object(image) or content
    repository = str(fields.get("repository") or "")
    if not repository:
        return ""
    registry = fields.get("registry")
    name = f"{registry}/{repository}" if registry else repository
    tag = fields.get("tag")
    return f"{name}:{tag}" if tag else name


def _program_of(content: Mapping[str, object]) -> str:
    """Return the program that a container starts instead of its image's; "": none."""
    argv = _argv_of(content.get("entrypoint"))
    # Kubernetes' command stands for the image's entrypoint, compose's only for its arguments.
    if not argv and ("args" in content or "name" in content):
        argv = _argv_of(content.get("command"))
    program = "".join(argv[:1])
    return "" if program.startswith("-") else program


def _replicas_of(content: Mapping[str, object], around: int) -> int:
    """Return how many replicas an object states, else those stated `around` it: Kubernetes' and
    dstack's, compose's, Helm's, SkyPilot's, and the fewest of KServe's and Ray's.
    """
    autoscaling = as_object(as_object(content.get("deployment_config")).get("autoscaling_config"))
    places = (
        content.get("replicas"),
        as_object(content.get("deploy")).get("replicas"),
        content.get("scale"),
        content.get("replicaCount"),
        as_object(content.get("service")).get("replicas"),
        content.get("minReplicas"),
        autoscaling.get("min_replicas"),
        as_object(content.get("deployment_config")).get("num_replicas"),
    )
    return next((number for number in places if isinstance(number, int)), around)


def _of_llm_service(spec: Mapping[str, object]) -> ShellCommand:
    """Return the command of a KServe service of vLLM's, whose first container has its image."""
    containers = as_object(spec.get("template")).get("containers")
    container: Mapping[str, object] = {}
    if isinstance(containers, list) and containers:
        container = as_object(containers[0])
    variables = _variables_of(container.get("env"))
    argv = list[str]()
    replicas = spec.get("replicas")
    if isinstance(replicas, int) and replicas > 1:
        argv.append(f"{REPLICAS}{replicas}")
    if spec.get("prefill"):
        argv.append(f"{PREFILL}{as_object(spec['prefill']).get('replicas', 1)}")
    model = _model_of_kserve(as_object(spec.get("model")))
    argv += [str(container.get("image", "")), "vllm", "serve", model]
    for kind, number in as_object(spec.get("parallelism")).items():
        if kind in ("tensor", "pipeline", "data"):
            argv += [f"--{kind}-parallel-size", str(number)]
    argv += _argv_of(container.get("args"))
    argv += split(variables.pop(ADDITIONAL_ARGS, ""))
    return ShellCommand(argv, variables)


def _model_of_kserve(model: Mapping[str, object]) -> str:
    """Return a model's hub id, or where it is kept."""
    uri = str(model.get("uri") or model.get("storageUri") or "")
    if uri.startswith(HUB):
        return uri.removeprefix(HUB)
    return str(model.get("name") or uri)


def _argv_of_kserve(content: Mapping[str, object]) -> list[str]:
    """Return the model and the flags of a server of KServe's, by vLLM's names."""
    argv = list[str]()
    for word in _argv_of(content.get("args")):
        flag, equals, value = word.partition("=")
        argv.append(FLAGS_OF_KSERVE.get(flag, flag) + equals + value)
    model = _model_of_kserve(content)
    return [model, *argv] if model else argv


def _argv_of_ray(content: Mapping[str, object]) -> list[str]:
    """Return the words of a server of Ray's."""
    models = as_object(content.get("model_loading_config")) or content
    model = models.get("model_source") or models.get("model_id") or ""
    argv = ["vllm", "serve", str(model)]
    if models.get("model_id"):
        argv += ["--served-model-name", str(models["model_id"])]
    return argv + _flags_of(as_object(content[RAY_KEY]))


def _flags_of(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments by their names as the flags of a command."""
    argv = list[str]()
    for name, value in arguments.items():
        flag = str(name).replace("_", "-")
        if isinstance(value, bool):
            switch = "" if value else "no-"
            argv.append(f"--{switch}{flag}")
        elif isinstance(value, Mapping | list):
            argv += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            argv += [f"--{flag}", str(value)]
    return argv


def _model_of_chart(content: Mapping[str, object]) -> str:
    """Return the model that the values of a chart name; "": none."""
    models = [content[key] for key in MODEL_KEYS if isinstance(content.get(key), str)]
    return str(models[0]) if models else ""


def _argv_of_chart(content: Mapping[str, object], arguments: Mapping[str, object]) -> list[str]:
    """Return the words of a server in the values of a chart of Helm.

    Args:
        content: Names the model.
        arguments: Flags in camel case, as `vllmConfig` of vLLM's production stack has them; others
            than vLLM's are the chart's own.
    """
    flags = dict[str, object]()
    for name, value in arguments.items():
        argument = re.sub(r"(?=[A-Z])", "_", str(name)).lower()
        is_of_chart = arguments is content and find("vllm", argument) is None
        if name not in (*MODEL_KEYS, EXTRA_KEY) and not is_of_chart:
            flags[argument] = value
    return [_model_of_chart(content), *_flags_of(flags), *_argv_of(arguments.get(EXTRA_KEY))]


def _argv_of(value: object) -> list[str]:
    """Return the words of a command, which is text or a list."""
    if isinstance(value, str):
        return split(CONTINUED.sub(" ", value))
    if isinstance(value, list):
        return [str(word) for word in value]
    return []


def _variables_of(value: object) -> dict[str, str]:
    """Return a container's environment: an object, or a list of objects or of assignments."""
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    variables = dict[str, str]()
    if not isinstance(value, list):
        return variables
    for entry in value:
        if isinstance(entry, Mapping) and "value" in entry:
            variables[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, content = entry.partition("=")
            variables[name] = content
    return variables


def list_in(text: str) -> list[ShellCommand]:
    """Return the command that is a list of words, in JSON or Python's."""
    if not text.lstrip().startswith("["):
        return []
    try:
        argv = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return []
    if not isinstance(argv, list):
        return []
    return [ShellCommand([str(word) for word in argv])]


def quadlet_in(text: str) -> list[ShellCommand]:
    """Return the command of the container that a unit of Podman's describes."""
    lines = UNIT_LINE.findall(CONTINUED.sub(" ", text))
    unit = dict(lines)
    if "Image" not in unit:
        return []
    argv = [name for name in VARIABLES_FILES if name in unit]
    if "Entrypoint" in unit:
        argv.append(f"{ENTRYPOINT_FLAG}={unit['Entrypoint']}")
    argv += [unit["Image"], *split(unit.get("Exec", ""))]
    variables = dict[str, str]()
    for name, content in lines:
        if name == "Environment":
            variables |= _variables_of(split(content))
    return [ShellCommand(argv, variables)]


@dataclass
class Stage:
    """A stage of a Dockerfile, which a later one may begin from.

    Attributes:
        image: Its base.
        variables: Values of ENV and ARG.
        entrypoint: Words of ENTRYPOINT.
        command: Words of CMD.
    """

    image: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def dockerfile_in(text: str) -> list[ShellCommand]:
    """Return the command of the image that a Dockerfile makes, which is its last stage."""
    if DOCKERFILE.search(text) is None:
        return []
    stages = dict[str, Stage]()  # by their names
    stage = Stage()
    before_stages = dict[str, str]()  # ARGs that a FROM may read
    for instruction, content in INSTRUCTION.findall(CONTINUED.sub(" ", text)):
        if instruction == "FROM":
            if not stage.image:
                before_stages = stage.variables
            stage = _begin_stage(substituted(content, before_stages), stages)
        elif instruction in ("ENV", "ARG"):
            stage.variables |= _variables_of_docker(content)
        else:
            words = list_in(content)
            argv = words[0].argv if words else split(content)
            if instruction == "ENTRYPOINT":
                stage.entrypoint = argv
            else:
                stage.command = argv
    argv = [stage.image, *stage.entrypoint, *stage.command]
    return [ShellCommand(argv, stage.variables)]


def _begin_stage(content: str, stages: dict[str, Stage]) -> Stage:
    """Begin a stage from an image, or from an earlier stage, and note it by its name.

    Args:
        content: What stands behind FROM: flags, the base, maybe AS and a name.
        stages: Earlier ones by name.
    """
    words = [word for word in content.split() if not word.startswith("-")]
    base = "".join(words[:1])
    stage = Stage(base)
    if base.lower() in stages:
        earlier = stages[base.lower()]
        stage = replace(earlier, variables=dict(earlier.variables))
    if len(words) > 2:  # BASE AS NAME
        stages[words[2].lower()] = stage
    return stage


def _variables_of_docker(content: str) -> dict[str, str]:
    """Read NAME=value of several variables, or NAME and a value."""
    words = split(content)
    if not words:
        return {}
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return _variables_of(words)
