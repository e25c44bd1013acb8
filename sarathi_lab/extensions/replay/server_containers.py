"""Commands of servers in descriptions of containers: of Kubernetes, compose, Helm, KServe, Ray,
dstack and SkyPilot, in Dockerfiles and in units of Podman's Quadlet.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import yaml

from sarathi_lab.extensions.replay.server_arguments import as_object, find
from sarathi_lab.extensions.replay.server_programs import (
    PROGRAM_WORDS,
    PROGRAMS,
    VARIABLES_FILES,
    container,
    notes_of_files,
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
# Keys whose value is YAML in a text: of a chart, as Argo CD has it, and of Ray's RayService.
YAML_KEYS = ("values", "serveConfigV2")
HELM_KEY = "vllmConfig"
CHART_KEY = "vllm"  # under which charts of their own have a server, its arguments in camel case
MODEL_KEYS = ("modelURL", "model", "modelId")  # of a chart
EXTRA_KEY = "extraArgs"
RAY_KEY = "engine_kwargs"  # of Ray's objects, beside what names a model
RAY_NAMES = ("model_loading_config.model_id", "model_id")
RAY_MODELS = ("model_loading_config.model_source", "model_source", *RAY_NAMES)
# Of KServe: formats of models that its runtime serves with vLLM, kinds of devices in parallel, and
# a variable with arguments.
FORMATS_OF_VLLM = ("vLLM", "huggingface")
PARALLEL = ("tensor", "pipeline", "data")
# Keys by those of compose: of `docker inspect`, RunPod, units of Podman's (Quadlet), Dockerfiles.
KEYS = {
    "Image": "image",
    "imageName": "image",
    "Entrypoint": "entrypoint",
    "ENTRYPOINT": "entrypoint",
    "Cmd": "command",
    "CMD": "command",
    "Exec": "command",
    "dockerArgs": "command",
    "Env": "environment",
    "Environment": "environment",
    "EnvironmentFile": "env_file",
}
# Numbers of replicas: of Kubernetes and dstack, compose, Helm, SkyPilot; the fewest of KServe, Ray.
REPLICAS = (
    *("replicas", "deploy.replicas", "scale", "replicaCount", "service.replicas"),
    *("minReplicas", "deployment_config.autoscaling_config.min_replicas"),
    "deployment_config.num_replicas",
)
LLM_SERVICE = "LLMInferenceService"
ADDITIONAL_ARGS, HUB = "VLLM_ADDITIONAL_ARGS", "hf://"
# Of Kubernetes, compose, and SkyPilot.
VARIABLES_KEYS = ("env", "environment", "envs")
REQUIRED = re.compile(r"\$\{(\w+):?\?[^}]*\}")  # a variable that must be set
# Behind comments, it begins with a key, or with an entry of a list.
BEGINS_YAML = re.compile(
    r"""(?:[ \t]*(?:(?:[#%]|---).*)?\r?\n)*[ \t]*(?:-\s|[{\[]|["']?[\w./-]+["']?[ \t]*:(?:\s|$))"""
)
DOCKERFILE = re.compile(r"^[ \t]*FROM[ \t]+\S+", re.MULTILINE)
INSTRUCTION = re.compile(r"^[ \t]*(FROM|ARG|ENV|ENTRYPOINT|CMD)[ \t]+(.*)$", re.MULTILINE)
STAGE = re.compile(r"(?<!\S)(?!--)\S+")  # its base, maybe AS and a name, behind flags
NAME_AND_VALUE = re.compile(r"^(\w+)[ \t]+(.*)$")  # of ENV, which also takes assignments
# A line of a unit of systemd's, of which Podman's Quadlet describes a container.
UNIT_LINE = re.compile(r"^(Image|Exec|Entrypoint|Environment|EnvironmentFile)=(.*)$", re.MULTILINE)


def containers_in(text: str) -> list[ShellCommand]:
    """Return the commands of the containers that YAML or JSON describes."""
    with suppress(ValueError):
        return [*containers_of(json.loads(text))]  # many times faster than as YAML
    if BEGINS_YAML.match(text):  # as reading a long log as YAML takes minutes
        with suppress(yaml.YAMLError):
            return [*containers_of([*yaml.safe_load_all(text)])]
    return []


def containers_of(content: object, replicas: int = 1) -> Iterator[ShellCommand]:
    """Yield the commands of the containers in a part of a description, of which there are so many
    `replicas` unless it says otherwise.
    """
    if isinstance(content, list):
        for entry in content:
            yield from containers_of(entry, replicas)
    if not isinstance(content, Mapping):
        return
    content = _as_container(content)
    stated = _at(content, *REPLICAS)
    if isinstance(stated, int):
        replicas = stated
    notes = _notes_of(content, replicas)
    image = _image_of(content) or _image_of(as_object(content.get(CHART_KEY)))
    variables = dict[str, str]()
    for key in VARIABLES_KEYS:
        variables |= _variables_of(content.get(key))
    image = substituted(image, variables)
    program = PROGRAM_WORDS["vllm"]
    arguments = _arguments_of_vllm(content)
    if not arguments:
        program, arguments = _words_of_container(content)
    if program or arguments:
        yield container(image, program, arguments, variables, notes)
        return
    for key in SCRIPT_KEYS:
        script = content.get(key)
        if isinstance(script, list):
            script = "\n".join(map(str, script))
        if not isinstance(script, str):
            continue
        for command in commands_in(script, variables, PROGRAMS):
            yield replace(command, image=image, notes=notes)
    for key, value in content.items():
        if key in YAML_KEYS and isinstance(value, str):
            yield from containers_in(value)
        else:
            yield from containers_of(value, replicas)


def _notes_of(content: Mapping[str, object], replicas: int) -> list[str]:
    """Note what the simulation of a container leaves out."""
    files = [name for name in VARIABLES_FILES if content.get(name)]
    notes = notes_of_files(files)
    if replicas > 1:
        notes.append(f"replicas={replicas} (one of them serves all requests here)")
    if content.get("kind") == LLM_SERVICE and content.get("prefill"):
        number = _at(content, "prefill.replicas") or 1
        notes.append(f"prefill={number} (prompts have devices of their own)")
    return notes


def _as_container(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return an object by the keys of compose; KServe's service of vLLM's with what its first
    container has.
    """
    if content.get("kind") != LLM_SERVICE:
        return {KEYS.get(key, key): value for key, value in content.items()}
    service = as_object(content.get("spec"))
    containers = _at(service, "template.containers")
    container_of_model: Mapping[str, object] = {}
    if isinstance(containers, list) and containers:
        container_of_model = as_object(containers[0])
    return {**container_of_model, **service, "kind": LLM_SERVICE}


def _image_of(content: Mapping[str, object]) -> str:
    """Return a container's image, which charts of Helm have in several fields."""
    image = content.get("image")
    if isinstance(image, str):
        return image
    fields = as_object(image) or content
    path = [str(fields[key]) for key in ("registry", "repository") if fields.get(key)]
    name = "/".join(path)
    tag = fields.get("tag")
    if name and tag:
        return f"{name}:{tag}"
    return name


def _words_of_container(content: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the program that a container starts instead of its image's, and its arguments."""
    entrypoint = _argv_of(content.get("entrypoint"))
    command = _argv_of(content.get("command"))
    arguments = _argv_of(content.get("args"))
    # Kubernetes' command stands for the image's entrypoint, compose's only for its arguments.
    if not entrypoint and ("args" in content or "name" in content):
        return command, arguments
    return entrypoint, command + arguments


def _at(content: Mapping[str, object], *paths: str) -> object:
    """Return the first value at one of several paths, whose keys are separated by dots."""
    for path in paths:
        value: object = content
        for key in path.split("."):
            value = as_object(value).get(key)
        if value is not None:
            return value
    return None


def _arguments_of_vllm(content: Mapping[str, object]) -> list[str]:
    """Return the words behind `vllm serve` of an object that describes a server of vLLM's otherwise
    than by a command; of another object, none.
    """
    stack = content.get(HELM_KEY)
    if isinstance(stack, Mapping):
        model = _at(content, *MODEL_KEYS) or ""
        return [str(model), *_flags_of_chart(stack)]
    chart = as_object(content.get(CHART_KEY))
    model = _at(chart, *MODEL_KEYS)
    if isinstance(model, str):
        return [model, *_flags_of_chart(_without_charts_own(chart))]
    options = content.get(RAY_KEY)
    if isinstance(options, Mapping):
        model = _at(content, *RAY_MODELS) or ""
        names = {"served_model_name": _at(content, *RAY_NAMES)}
        return [str(model), *flags_of({**names, **options})]
    arguments = _argv_of(content.get("args"))
    if content.get("kind") == LLM_SERVICE:
        sizes = as_object(content.get("parallelism"))
        degrees = {f"{kind}_parallel_size": sizes.get(kind) for kind in PARALLEL}
        variables = _variables_of(content.get("env"))
        extra_arguments = split(variables.get(ADDITIONAL_ARGS, ""))
        model = _model_of_kserve(as_object(content.get("model")))
        return [model, *flags_of(degrees), *arguments, *extra_arguments]
    if _at(content, "modelFormat.name") in FORMATS_OF_VLLM:
        return [_model_of_kserve(content), *arguments]
    return []


def _without_charts_own(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a chart that are arguments of vLLM's."""
    arguments = dict[str, object]()
    for name, value in values.items():
        is_argument = find("vllm", _from_camel_case(str(name))) is not None
        if is_argument or name == EXTRA_KEY:
            arguments[name] = value
    return arguments


def _model_of_kserve(model: Mapping[str, object]) -> str:
    """Return a model's hub id, or where it is kept."""
    uri = str(_at(model, "uri", "storageUri") or "")
    if uri.startswith(HUB):
        return uri.removeprefix(HUB)
    return str(model.get("name") or uri)


def flags_of(arguments: Mapping[str, object]) -> list[str]:
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


def _from_camel_case(name: str) -> str:
    return re.sub(r"(?=[A-Z])", "_", name).lower()


def _flags_of_chart(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments in camel case as flags, then those that the chart hands on."""
    flags = {_from_camel_case(str(name)): value for name, value in arguments.items()}
    extra_arguments = _argv_of(flags.pop(_from_camel_case(EXTRA_KEY), None))
    return [*flags_of(flags), *extra_arguments]


def _argv_of(value: object) -> list[str]:
    """Return the words of a command, which is text, a list, or text that has a list. Variables
    stay, but for what compose writes of them: an escaped $, or a message for one that is not set.
    """
    if isinstance(value, str):
        value = REQUIRED.sub(r"${\1}", value.replace("$$", "$"))
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, SyntaxError):
            return [str(word) for word in ast.literal_eval(value.strip())]
    if isinstance(value, str):
        return split(CONTINUED.sub(" ", value))
    if isinstance(value, list):
        return [str(word).replace("$$", "$") for word in value]
    return []


def _variables_of(value: object) -> dict[str, str]:
    """Return a container's environment: an object, a list of objects, or assignments."""
    if isinstance(value, Mapping):
        return {str(name): str(content) for name, content in value.items()}
    variables = dict[str, str]()
    entries = value if isinstance(value, list) else _argv_of(value)
    for entry in entries:
        if isinstance(entry, Mapping) and "value" in entry:
            variables[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, content = entry.partition("=")
            variables[name] = content
    return variables


def list_in(text: str) -> list[ShellCommand]:
    """Return the command that is a list of words, in JSON or Python's."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [ShellCommand(_argv_of(text))]
    return []


def quadlet_in(text: str) -> list[ShellCommand]:
    """Return the command of the container that a unit of Podman's describes."""
    unit = dict[str, object]()
    for name, content in UNIT_LINE.findall(CONTINUED.sub(" ", text)):
        key = KEYS[name]
        before = unit.get(key, "")
        unit[key] = f"{before} {content}".strip()
    if "image" not in unit:
        return []
    return [*containers_of(unit)]


def dockerfile_in(text: str) -> list[ShellCommand]:
    """Return the command of the image that a Dockerfile makes, which is its last stage."""
    if DOCKERFILE.search(text) is None:
        return []
    stages = dict[str, dict[str, object]]()  # by their names
    stage: dict[str, object] = {"environment": ""}  # before the first one, what FROM may read
    before_stages = stage
    for instruction, content in INSTRUCTION.findall(CONTINUED.sub(" ", text)):
        if instruction == "FROM":
            variables = _variables_of(before_stages["environment"])
            base, *name = STAGE.findall(substituted(content, variables))
            stage = {"image": base, "environment": "", **stages.get(base.lower(), {})}
            if name:  # BASE AS NAME
                stages[name[-1].lower()] = stage
        elif instruction in ("ENV", "ARG"):
            assignments = NAME_AND_VALUE.sub(r"\1='\2'", content)
            stage["environment"] = f"{stage['environment']} {assignments}"
        else:
            stage[KEYS[instruction]] = content
    return [*containers_of(stage)]
