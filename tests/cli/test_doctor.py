"""The doctor reports what it has tried, and a machine that cannot work is said to be one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

from onegrid.cli import app, doctor, reference
from onegrid.config import reference as config_reference
from onegrid.errors import ConfigError
from onegrid.formats import QUANTIZERS, digest, quantize

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_known_tensor_gives_the_same_codes_on_every_device(device):
    x = doctor.known_tensor(device)
    for name, expected in doctor.CODES.items():
        assert f"{digest(quantize(x, QUANTIZERS[name])):016x}" == expected, name


def test_a_healthy_machine_is_called_healthy_in_json_too(capsys):
    app.main(["doctor", "--json", "--device", "cpu"], standalone_mode=False)
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is True
    by_name = {(f["about"], f["name"]): f for f in answer["findings"]}
    assert by_name["software", "torch"]["detail"] == torch.__version__
    assert {name for about, name in by_name if about == "format"} == set(doctor.CODES)
    assert all(f["state"] in ("ok", "note", "absent") for f in answer["findings"])
    assert "native not here" in by_name["format", "fp8_tensor"]["detail"]
    assert by_name["order of sums", "pins"]["state"] == "ok"
    assert "free of" in by_name["space", "memory"]["detail"]


def test_codes_that_are_not_the_defined_ones_are_a_broken_format_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setitem(doctor.CODES, "nvfp4", "0" * 16)
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", "--device", "cpu"], standalone_mode=False)
    assert ended.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "this device rounds otherwise" in printed and "a run cannot work here" in printed


def test_sums_that_depend_on_their_batch_are_broken(monkeypatch):
    def unproved(*shapes, **options):
        proof = real(*shapes, **options)
        return type(proof)(
            **{name: getattr(proof, name) for name in proof.__slots__ if name != "failed"}, failed=("matmul at 2 rows",)
        )

    real = doctor.self_test
    monkeypatch.setattr(doctor, "self_test", unproved)
    found = next(f for f in doctor.examine("cpu") if f.about == "order of sums")
    assert (found.state, found.required) == ("broken", True) and "matmul at 2 rows" in found.detail


def test_a_required_library_that_is_missing_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "a-library-that-is-not-here"))
    missing = [f for f in doctor.examine("cpu") if f.required and f.state != "ok"]
    assert [f.name for f in missing] == ["a-library-that-is-not-here"]
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        doctor.examine("tpu")


def test_an_extra_to_install_is_printed_as_it_is_typed(monkeypatch, capsys):
    monkeypatch.setitem(doctor.EXTRAS, "hf", ("a-library-that-is-not-here",))
    assert doctor.run("cpu"), "no run needs it"
    assert "pip install 'onegrid[hf]'" in capsys.readouterr().out


def test_the_doctor_knows_the_libraries_of_the_project():
    assert [d.partition(">")[0].partition("<")[0] for d in PROJECT["dependencies"]] == list(doctor.REQUIRED)
    extras = PROJECT["optional-dependencies"]
    for extra, names in doctor.EXTRAS.items():
        assert all(any(d.startswith(name) for d in extras[extra]) for name in names), extra
    users = set(extras) - {"test"}
    assert users <= set(doctor.EXTRAS), "an extra that the doctor does not look for"


def test_the_configuration_page_is_what_the_classes_say(capsys):
    reference.run(None, markdown=True)
    page = capsys.readouterr().out
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "onegrid config --markdown > docs/configuration.md"
    for row in config_reference():
        assert f"| `{row.key.rpartition('.')[2]}` |" in page
    assert "Divides the logits." in page, "what stands below a key in its class"


def test_config_prints_a_section_and_refuses_one_that_is_none(capsys):
    reference.run("loop", markdown=False)
    printed = capsys.readouterr().out
    assert "loop.num_steps" in printed and "learner.lr" not in printed
    with pytest.raises(ConfigError, match="there is no section or key 'lop'"):
        reference.run("lop", markdown=False)
