"""Jobs of a sweep: each has the configuration that Hydra composes of its settings."""

from __future__ import annotations

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from sarathi_lab.config.combinations import combine
from sarathi_lab.config.instantiate import make_loader, read_by
from sarathi_lab.config.jobs import Composer
from sarathi_lab.config.sweeper import compose

# Settings of sweeps, and how many times Hydra composes each: once for a combination of options.
SWEPT = [
    (["policy=sarathi,orca", "batch=2,3", "stall=0.1,1"], 2),
    (["chunk=64,null", "cache.num_blocks=auto,99", "output='a b',c"], 1),
    (["workload.arrivals=poisson", "workload.rate=1,null", "baselines=[orca],[]"], 2),
    (["hardware=a6000,h100", "batch=4,8", "hardware.matmul_efficiency=0.5,0.6"], 2),
    (["cache.block_size=8,16", "cache={block_size:4}", "batch=4,8"], 2),
    (["+executor={pipeline_parallel:1},{pipeline_parallel:2}", "batch=2,3"], 2),
    (["hydra.job.name=a,b", "batch=2,3"], 2),
]


@pytest.mark.parametrize(("line", "number"), SWEPT)
def test_each_job_is_as_hydra_composes_it(line, number):
    sweeper = compose(["executor=simulated"])
    load = sweeper.hydra_context.config_loader.load_sweep_config
    settings = OverridesParser.create().parse_overrides(["executor=simulated", *line])
    composed = []

    def counted(job):
        composed.append(job)
        return load(sweeper.config, job)

    composer = Composer(counted, settings)
    jobs = [composer.job(job) for job in combine(settings)]
    assert len(composed) == number < len(jobs)
    for job in jobs:
        expected = load(sweeper.config, list(job.settings))
        assert OmegaConf.to_yaml(job.composed()) == OmegaConf.to_yaml(expected)


def test_a_job_without_swept_settings_is_composed_once(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(make_loader()), "load_sweep_config", None)
        sweeper = compose(["executor=simulated", "batch=3", "policy.min_decodes=2", "-m"])
    load = sweeper.hydra_context.config_loader.load_sweep_config
    (job,) = sweeper.jobs
    expected = load(sweeper.config, list(job.settings))
    assert OmegaConf.to_yaml(job.composed()) == OmegaConf.to_yaml(expected)


def test_the_tests_compose_as_hydra_does(monkeypatch):
    """`composing` keeps what options decide; the second and third line choose the same."""
    lines = (
        ["policy=orca"],
        ["policy=vllm_v1", "batch=3"],
        ["policy=vllm_v1", "~hardware.num_sms"],
    )

    def composed() -> list[str]:
        load = make_loader().load_configuration
        return [OmegaConf.to_yaml(load("config", line, RunMode.RUN)) for line in lines]

    kept = composed()
    own = defaults_list.create_defaults_list
    monkeypatch.setattr(config_loader_impl, "create_defaults_list", own)
    assert kept == composed()


def test_what_reads_a_short_name_is_told_by_the_options():
    groups = read_by()
    assert groups["chunk"] == ("policy",)
    assert groups["seed"] == ("workload", "executor", "speculation")
    assert groups["hardware"] == ("executor",)
    assert not {"batch", "output", "stall"} & groups.keys()
