"""Switches: names, sources and their order, tokens, contexts, and the messages of mistakes."""

from __future__ import annotations

import contextvars
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainfuse import settings as settings_module  # the object: the package re-exports it
from trainfuse import tokens
from trainfuse.errors import (
    BackendUnavailable,
    BadOption,
    BadTokenList,
    OptionError,
    RemovedName,
    TokenConflict,
    TrainfuseWarning,
    UnknownOperator,
    UnknownOption,
    UnknownToken,
)
from trainfuse.fields import MODES, SWITCHES, Settings
from trainfuse.options import resolve
from trainfuse.settings import (
    current,
    fuser,
    set_enabled,
    settings,
    skip_op,
    strict_fusion,
)

# A value other than the default for every field, as Python and as environment text.
OTHER: dict[str, tuple[Any, str]] = {
    "enabled": (False, "0"),
    "mode": ("reduce-overhead", "reduce-overhead"),
    "backend": ("eager", "eager"),
    "force_backend": ("none", "none"),
    "verify": (3, "3"),
    "nan_check": (True, "1"),
    "cuda_graph": ("off", "off"),
    "whole_step": (False, "off"),
    "recompute": (False, "false"),
    "horizontal": (False, "no"),
    "single_node": (True, "1"),
    "autodiff_inlining": (False, "0"),
    "min_subgraph_nodes": (5, "5"),
    "skip_ops": (frozenset({"aten.add", "aten.mul"}), "aten::add,aten.mul.Tensor"),
    "fuse_first": (0, "0"),
    "fallback": (False, "0"),
    "fma": (False, "0"),
    "autotune": ("full", "full"),
    "rng": ("eager", "eager"),
    "memory_budget": (0.5, "0.5"),
    "chunk_memory": (4096, "4096"),
    "max_plans": (2, "2"),
    "keep_gradients": (True, "on"),
    "strict": (True, "1"),
    "check": (True, "yes"),
    "cache_dir": (Path("elsewhere"), "elsewhere"),
    "dump": ((tokens.Token("kernel", ("out",)), tokens.Token("plan")), "kernel(out),plan"),
    "log": ("program:>grouping", "program:>grouping"),
    "debug": (2, "2"),
}
BAD: dict[str, Any] = {
    "enabled": "maybe",
    "mode": "fastest",
    "backend": "cuda",
    "force_backend": "nnc",
    "verify": 0,
    "nan_check": 0,
    "cuda_graph": True,
    "whole_step": 1,
    "recompute": None,
    "horizontal": "on",
    "single_node": 0,
    "autodiff_inlining": 2,
    "min_subgraph_nodes": 0,
    "skip_ops": 3,
    "fuse_first": -1,
    "fallback": "",
    "fma": 1,
    "autotune": "fast",
    "rng": "philox",
    "memory_budget": 1.5,
    "chunk_memory": 0.5,
    "max_plans": 0,
    "keep_gradients": "yes",
    "strict": None,
    "check": 5,
    "cache_dir": 7,
    "dump": "kernel(a,b)",
    "log": 4,
    "debug": 6,
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Set TRAINFUSE_* variables and read them; the session's own come back afterwards."""

    def load(**variables: str) -> None:
        for name, text in variables.items():
            monkeypatch.setenv(f"TRAINFUSE_{name}", text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainfuseWarning)
            settings.reload_env()

    yield load
    monkeypatch.undo()
    settings.reload_env()


def quietly(name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainfuseWarning)
        setattr(settings, name, value)


def test_the_tables_above_cover_every_field() -> None:
    assert list(OTHER) == list(BAD) == list(SWITCHES)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_field_is_assigned_patched_and_read_from_its_variable(
    name: str, environment: Any
) -> None:
    value, text = OTHER[name]
    default = getattr(current(), name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainfuseWarning)
        with settings.patch(**{name: value}) as inside:
            assert getattr(inside, name) == getattr(settings, name) == value
    assert getattr(settings, name) == default
    quietly(name, value)
    assert getattr(settings, name) == value
    settings.reset()
    environment(**{name.upper(): text})
    assert getattr(settings, name) == value


@pytest.mark.parametrize("name", SWITCHES)
def test_a_bad_value_names_the_field_and_what_it_takes(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        setattr(settings, name, BAD[name])
    assert name in str(caught.value)
    assert getattr(settings, name) == getattr(current(), name)


@pytest.mark.parametrize(
    "name", [name for name in SWITCHES if name not in ("skip_ops", "cache_dir")]
)
def test_a_bad_variable_is_an_error_that_names_it(name: str, environment: Any) -> None:
    with pytest.raises(OptionError, match=f"TRAINFUSE_{name.upper()}"):
        environment(**{name.upper(): "nonsense(("})


def test_the_order_of_sources(environment: Any) -> None:
    environment(VERIFY="step", BACKEND="eager")
    assert (settings.verify, settings.backend) == ("step", "eager")
    settings.verify = 7
    assert settings.verify == 7
    with settings.patch(verify="off"):
        settings.verify = 9  # assignment inside a patch: the patch still wins
        assert settings.verify == "off"
        assert resolve(verify="kernels").settings().verify == "kernels"
        assert resolve().settings().verify == "off"
    assert settings.verify == 9


def test_disable_and_force_backend_beat_code(environment: Any) -> None:
    environment(DISABLE="verify,whole_step,fma,op(aten.add,aten::mul)", FORCE_BACKEND="inductor")
    with settings.patch(verify="step", backend="eager", skip_ops="aten.sub"):
        asked = resolve(verify="step", whole_step=True, backend="eager", fma=True).settings()
    assert (asked.verify, asked.whole_step, asked.fma) == ("off", False, False)
    assert asked.skip_ops == {"aten.add", "aten.mul", "aten.sub"}
    assert asked.chosen_backend == "inductor"


def test_off_by_falling_priority(environment: Any) -> None:
    """FORCE_BACKEND, then set_enabled, then TRAINFUSE_ENABLED."""
    environment(ENABLED="off")
    assert current().chosen_backend == "none"
    assert set_enabled(True) is False
    assert current().chosen_backend is None
    assert set_enabled(False) is True
    assert current().chosen_backend == "none"
    environment(FORCE_BACKEND="eager")
    assert current().chosen_backend == "eager"


def test_a_mode_sets_fields_below_what_is_said_beside_it() -> None:
    assert MODES["reduce-overhead"] == {"cuda_graph": "require"}
    assert resolve(mode="reduce-overhead").settings().cuda_graph == "require"
    both = resolve(mode="reduce-overhead", cuda_graph="auto").settings()
    assert both.cuda_graph == "auto"
    with settings.patch(cuda_graph="off"):
        assert resolve(mode="reduce-overhead").settings().cuda_graph == "require"
    settings.mode = "reduce-overhead"
    assert resolve().settings().cuda_graph == "require"
    assert resolve(mode="default").settings().cuda_graph == "auto"


@pytest.mark.parametrize("name", [name for name, switch in SWITCHES.items() if switch.is_token])
def test_tokens_turn_fields_off_and_on(name: str, environment: Any) -> None:
    environment(DISABLE=name)
    assert getattr(settings, name) == SWITCHES[name].off
    with pytest.raises(TokenConflict, match=name):
        environment(ENABLE=name)
    environment(DISABLE="")
    assert getattr(settings, name) == SWITCHES[name].on


def test_enable_is_below_code(environment: Any) -> None:
    environment(ENABLE="single_node")
    assert current().threshold == 1
    settings.single_node = False
    assert current().threshold == 2


@pytest.mark.parametrize(
    ("variables", "error", "words"),
    [
        ({"DISABLE": "fallbak"}, UnknownToken, ["TRAINFUSE_DISABLE", "'fallback'", "horizontal"]),
        ({"ENABLE": "op(aten.add)"}, UnknownToken, ["TRAINFUSE_ENABLE", "'op'"]),
        ({"DISABLE": "fma(1)"}, BadOption, ["fma(1)"]),
        ({"DISABLE": "op"}, BadOption, ["op(aten.add)"]),
        ({"DISABLE": "op(aten.ad)"}, UnknownOperator, ["aten.ad", "aten.add"]),
        ({"DISABLE": "op(aten.add"}, BadTokenList, ["parentheses"]),
        ({"DISABLE": "op(a))"}, BadTokenList, ["parentheses"]),
        ({"DISABLE": "op(aten.add)x"}, BadTokenList, ["after the ')'"]),
        ({"DUMP": "kernels"}, UnknownToken, ["'kernel'", "program"]),
        ({"BAKEND": "eager"}, UnknownOption, ["TRAINFUSE_BAKEND", "TRAINFUSE_BACKEND"]),
        ({"LOG": "grouping:>>>>cache"}, BadTokenList, ["three"]),
        ({"LOG": ">groupin"}, UnknownToken, ["'grouping'"]),
    ],
)
def test_mistakes_in_variables(
    variables: dict[str, str], error: type[OptionError], words: list[str], environment: Any
) -> None:
    before = current()
    with pytest.raises(error) as caught:
        environment(**variables)
    assert all(word in str(caught.value) for word in words), caught.value
    assert current() == before


def test_settings_are_local_to_their_context() -> None:
    def elsewhere() -> Any:
        settings.verify = "off"
        return settings.verify

    assert contextvars.copy_context().run(elsewhere) == "off"
    assert settings.verify == "kernels"


def test_resolved_settings_are_the_same_object_until_a_source_changes() -> None:
    options = resolve(verify="off")
    first = options.settings()
    assert options.settings() is first
    with settings.patch(max_plans=3):
        assert options.settings() is not first
        assert options.settings().max_plans == 3
    assert options.settings() == first


def test_plan_key_holds_what_changes_a_plan_and_nothing_else() -> None:
    base = Settings().plan_key()
    assert Settings(fma=False).plan_key() != base
    assert Settings(dump=(tokens.Token("plan"),), log="program", check=True).plan_key() == base


def test_the_threshold_of_subgraphs() -> None:
    assert Settings().threshold == 2
    assert Settings(single_node=True).threshold == 1
    assert Settings(autodiff_inlining=False).threshold == 1
    assert Settings(single_node=True, min_subgraph_nodes=5).threshold == 5


@pytest.mark.covers("B switches, more")
def test_fuser_nests_and_restores() -> None:
    with fuser("eager"):
        assert current().chosen_backend == "eager"
        with fuser("none"):
            assert current().chosen_backend == "none"
            with fuser("inductor"):
                assert current().chosen_backend == "inductor"
        assert current().chosen_backend == "eager"
    assert current().chosen_backend is None
    with pytest.raises(BadOption, match="none"), fuser("fuser2"):
        pass


@pytest.mark.covers("B switches")
def test_fuser_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with fuser("triton"):
        assert current().chosen_backend == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match="no GPU"), fuser("triton"):
        pass


@pytest.mark.covers("B switches, more")
def test_skip_op_sets_and_returns_what_was() -> None:
    assert skip_op("aten.add", True) is False
    assert skip_op("aten::add.Tensor", True) is True
    assert settings.skip_ops == {"aten.add"}
    assert skip_op("aten.add", False) is True
    assert settings.skip_ops == frozenset()
    with pytest.raises(UnknownOperator, match=r"aten\.sigmoid"):
        skip_op("aten.sigmoi")


def test_strict_fusion_is_scoped() -> None:
    with strict_fusion():
        assert current().strict
    assert not current().strict


def test_costly_settings_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["trainfuse.settings"]
    monkeypatch.setattr(module, "_warned", set())
    with pytest.warns(TrainfuseWarning, match="fma=False"), settings.patch(fma=False):
        pass
    with warnings.catch_warnings(), settings.patch(fma=False):
        warnings.simplefilter("error")


def test_print_shows_source_and_cost(environment: Any) -> None:
    environment(DISABLE="cuda_graph")
    settings.max_plans = 3
    with settings.patch(skip_ops="aten.add"):
        text = str(settings)
    assert "cuda_graph = 'off'  [environment, above code]" in text
    assert "max_plans = 3  [assignment]" in text
    assert "skip_ops = aten.add  [patch]  these operators stay ATen" in text
    assert "verify" not in text


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("_jit_set_nvfuser_single_node_mode", "single_node"),
        ("_jit_set_nvfuser_horizontal_mode", "horizontal"),
        ("_jit_set_nvfuser_guard_mode", "always guarded"),
        ("_jit_set_nvfuser_skip_node_kind", "skip_op"),
        ("_jit_set_nvfuser_enabled", "set_enabled"),
        ("_debug_set_autodiff_subgraph_inlining", "autodiff_inlining"),
    ],
)
def test_removed_names_name_their_successor(name: str, successor: str) -> None:
    with pytest.raises(RemovedName, match=successor):
        getattr(settings, name)
    with pytest.raises(RemovedName, match=successor):
        setattr(settings, name, True)


def test_unknown_names() -> None:
    with pytest.raises(UnknownOption, match="'verify'"):
        settings.verfy = "off"
    with pytest.raises(UnknownOption, match="use one of"), settings.patch(nothing=1):
        pass
    assert not hasattr(settings, "nothing")
    assert "verify" in dir(settings)
    assert settings_module is settings


def test_variables_reach_a_fresh_process() -> None:
    code = (
        "import json\nfrom trainfuse.settings import current\n"
        "s = current()\nprint(json.dumps([s.chosen_backend, s.horizontal, s.log_text]))"
    )
    variables = {
        "TRAINFUSE_DISABLE": "horizontal",
        "TRAINFUSE_FORCE_BACKEND": "none",
        "TRAINFUSE_DEBUG": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["none", False, "capture:>slicing:>grouping"]
