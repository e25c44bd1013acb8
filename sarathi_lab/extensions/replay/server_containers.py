"""Commands of servers in descriptions of containers: of Kubernetes, compose, Helm, KServe, Ray,
dstack and SkyPilot, in Dockerfiles and in units of Podman's Quadlet.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import yaml

from sarathi_lab.extensions.replay.server_arguments import as_object, find
from sarathi_lab.extensions.replay.server_programs import (
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
# The same of a unit of Podman's (Quadlet), and of a Dockerfile.
KEYS_OF_UNIT = {"Image": "image", "Entrypoint": "entrypoint", "Exec": "command"}
KEYS_OF_UNIT |= {"Environment": "environment", "EnvironmentFile": "env_file"}
KEYS_OF_DOCKERFILE = {"ENTRYPOINT": "entrypoint", "CMD": "command"}
LLM_SERVICE = "LLMInferenceService"
ADDITIONAL_ARGS, HUB = "VLLM_ADDITIONAL_ARGS", "hf://"
# Of Kubernetes, compose, and SkyPilot.
VARIABLES_KEYS = ("env", "environment", "envs")
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
    return [*containers_of(documents)]


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
    replicas = _replicas_of(content, replicas)
    image = _image_of(content) or _image_of(as_object(content.get(CHART_KEY)))
    variables = dict[str, str]()
    for key in VARIABLES_KEYS:
        variables |= _variables_of(content.get(key))
    notes = notes_of_files([name for name in VARIABLES_FILES if content.get(name)])
    if replicas > 1:
        notes.append(f"replicas={replicas} (one of them is)")
    if content.get("kind") == LLM_SERVICE and content.get("prefill"):
        number = as_object(content["prefill"]).get("replicas", 1)
        notes.append(f"prefill={number} (prompts have devices of their own)")
    for arguments_of in FORMS:
        arguments = arguments_of(content)
        if arguments:
            yield container(image, ["vllm", "serve"], arguments, variables, notes)
            return
    program, arguments = _words_of_container(content)
    if program or arguments:
        yield container(image, program, arguments, variables, notes)
        return
    for key in SCRIPT_KEYS:
        script = content.get(key)
        if isinstance(script, list):
            script = "\n".join(map(str, script))
        if isinstance(script, str):
            for command in commands_in(script, variables, PROGRAMS):
                yield replace(command, image=image, notes=notes)
    for key, value in content.items():
        if key == "values" and isinstance(value, str):  # a chart's, as Argo CD has them
            yield from containers_in(value)
        else:
            yield from containers_of(value, replicas)


def _as_container(content: Mapping[str, object]) -> Mapping[str, object]:
    """Return an object by the keys of compose, where it describes a container by Docker's or
    RunPod's; and KServe's service of vLLM's with what its first container has.
    """
    for keys in (KEYS_OF_DOCKER, KEYS_OF_RUNPOD):
        if all(key in content for key in keys):
            return {name: content[key] for key, name in keys.items()}
    if content.get("kind") != LLM_SERVICE:
        return content
    service = as_object(content.get("spec"))
    containers = as_object(service.get("template")).get("containers")
    first = containers[0] if isinstance(containers, list) and containers else {}
    return {**as_object(first), **service, "kind": LLM_SERVICE}


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


def _words_of_container(content: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the program that a container starts instead of its image's, and its arguments."""
    entrypoint = _argv_of(content.get("entrypoint"))
    command = _argv_of(content.get("command"))
    arguments = _argv_of(content.get("args"))
    # Kubernetes' command stands for the image's entrypoint, compose's only for its arguments.
    if not entrypoint and ("args" in content or "name" in content):
        return command, arguments
    return entrypoint, command + arguments


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


def _argv_of_llm_service(content: Mapping[str, object]) -> list[str]:
    """Return the arguments of a KServe service of vLLM's."""
    if content.get("kind") != LLM_SERVICE:
        return []
    argv = [_model_of_kserve(as_object(content.get("model")))]
    for kind, number in as_object(content.get("parallelism")).items():
        if kind in ("tensor", "pipeline", "data"):
            argv += [f"--{kind}-parallel-size", str(number)]
    variables = _variables_of(content.get("env"))
    return [*argv, *_argv_of(content.get("args")), *split(variables.get(ADDITIONAL_ARGS, ""))]


def _model_of_kserve(model: Mapping[str, object]) -> str:
    """Return a model's hub id, or where it is kept."""
    uri = str(model.get("uri") or model.get("storageUri") or "")
    if uri.startswith(HUB):
        return uri.removeprefix(HUB)
    return str(model.get("name") or uri)


def _argv_of_kserve(content: Mapping[str, object]) -> list[str]:
    """Return the model and the flags of a server of KServe's, by vLLM's names."""
    if as_object(content.get("modelFormat")).get("name") not in FORMATS_OF_VLLM:
        return []
    argv = list[str]()
    for word in _argv_of(content.get("args")):
        flag, equals, value = word.partition("=")
        argv.append(FLAGS_OF_KSERVE.get(flag, flag) + equals + value)
    model = _model_of_kserve(content)
    return [model, *argv] if model else argv


def _argv_of_ray(content: Mapping[str, object]) -> list[str]:
    """Return the arguments of a server of Ray's."""
    if not isinstance(content.get(RAY_KEY), Mapping):
        return []
    models = as_object(content.get("model_loading_config")) or content
    model = models.get("model_source") or models.get("model_id") or ""
    flags = {"served_model_name": models.get("model_id"), **as_object(content[RAY_KEY])}
    return [str(model), *flags_of(flags)]


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


def _model_of_chart(content: Mapping[str, object]) -> str:
    """Return the model that the values of a chart name; "": none."""
    models = [content[key] for key in MODEL_KEYS if isinstance(content.get(key), str)]
    return str(models[0]) if models else ""


def _argv_of_stack(content: Mapping[str, object]) -> list[str]:
    """Return the arguments of a server in the values of the chart of vLLM's production stack."""
    arguments = content.get(HELM_KEY)
    if not isinstance(arguments, Mapping):
        return []
    return [_model_of_chart(content), *_flags_of_chart(arguments)]


def _argv_of_chart(content: Mapping[str, object]) -> list[str]:
    """Return the arguments of a server in the values of another chart, which has its own, too."""
    chart = as_object(content.get(CHART_KEY))
    model = _model_of_chart(chart)
    if not model:
        return []
    names = [name for name in chart if find("vllm", _from_camel_case(name)) is not None]
    return [
        model,
        *_flags_of_chart({name: chart[name] for name in (*names, EXTRA_KEY) if name in chart}),
    ]


def _from_camel_case(name: str) -> str:
    return re.sub(r"(?=[A-Z])", "_", name).lower()


def _flags_of_chart(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments in camel case as flags, then those that the chart hands on."""
    flags = dict[str, object]()
    for name, value in arguments.items():
        if name not in (*MODEL_KEYS, EXTRA_KEY):
            flags[_from_camel_case(name)] = value
    return [*flags_of(flags), *_argv_of(arguments.get(EXTRA_KEY))]


# What describes a server of vLLM's otherwise than by a command: each of these returns the words
# behind `vllm serve`, or none for an object of another kind.
FORMS = (_argv_of_stack, _argv_of_chart, _argv_of_ray, _argv_of_llm_service, _argv_of_kserve)


def _argv_of(value: object) -> list[str]:
    """Return the words of a command, which is text, a list, or text that has a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, SyntaxError):
            return [str(word) for word in ast.literal_eval(value.strip())]
    if isinstance(value, str):
        return split(CONTINUED.sub(" ", value))
    if isinstance(value, list):
        return [str(word) for word in value]
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
    is_list = text.startswith("[") and text.endswith("]")
    return [ShellCommand(_argv_of(text))] if is_list else []


def quadlet_in(text: str) -> list[ShellCommand]:
    """Return the command of the container that a unit of Podman's describes."""
    unit = dict[str, object]()
    for name, content in UNIT_LINE.findall(CONTINUED.sub(" ", text)):
        key = KEYS_OF_UNIT[name]
        unit[key] = f"{unit.get(key, '')} {content}".strip()
    return [*containers_of(unit)] if "image" in unit else []


def dockerfile_in(text: str) -> list[ShellCommand]:
    """Return the command of the image that a Dockerfile makes, which is its last stage."""
    if DOCKERFILE.search(text) is None:
        return []
    stages = dict[str, dict[str, object]]()  # by their names
    stage: dict[str, object] = {"environment": ""}  # before the first one, what FROM may read
    before_stages = stage
    for instruction, content in INSTRUCTION.findall(CONTINUED.sub(" ", text)):
        if instruction == "FROM":
            words = substituted(content, _variables_of(before_stages["environment"])).split()
            base, *name = [word for word in words if not word.startswith("--")]
            stage = {"image": base, "environment": "", **stages.get(base.lower(), {})}
            if name:  # BASE AS NAME
                stages[name[-1].lower()] = stage
        elif instruction in ("ENV", "ARG"):
            stage["environment"] = f"{stage['environment']} {_assignments(content)}"
        else:
            stage[KEYS_OF_DOCKERFILE[instruction]] = content
    return [*containers_of(stage)]


def _assignments(content: str) -> str:
    """Return assignments as NAME=value, which may be written as NAME and a value."""
    return re.sub(
        r"^(\w+)[ \t]+(.*)$", lambda match: f"{match[1]}={shlex.quote(match[2])}", content
    )
