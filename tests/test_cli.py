import json

import pytest
import yaml
from diffusers import AutoencoderKL
from helpers.modules import ROOT

from debias_diffusion.app.cli import COMMANDS, evaluations, main
from debias_diffusion.errors import EXTRAS


def run(capsys, *arguments):
    """(exit code, stdout, stderr)"""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as exit:
        code = exit.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def error(capsys, *arguments):
    """The one line that a command which the user got wrong leaves on stderr."""
    code, _, err = run(capsys, *arguments)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def world(world):
    """As options."""
    base, data, images = world
    return ["--data", data, "--images", images, "--model", base]


QUICK = ["--validation=4", "--batch=8", "--components=3", "--epochs=9", "--max-steps=1", "--workers=0"]


def test_help_names_every_command_and_option(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in ("quickstart", "train", "export", "generate", "evaluate"))
    code, out, _ = run(capsys, "evaluate")
    assert code == 0 and all(name in out for name in evaluations())
    commands = COMMANDS.keys() - {"app", "evaluate"}  # the page's own tests ask for the former's help
    for command in (*([name] for name in commands), *(["evaluate", name] for name in evaluations())):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0 and f"debias-diffusion {' '.join(command)}" in out and "--config" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Unknown command 'trian'. Did you mean train?"),
        (["train", "--epocs=3"], "Unknown option 'epocs'. Did you mean epochs"),
        (["train", "--batch=many"], "batch is 'many', but must be a whole number, at least 1, or auto."),
        (["generate", "a", "star", "--base=toy/sdxl"], "'star' belongs to no option."),
        (["train"], "Missing: --data, --output, --model. For example: debias-diffusion train"),
        (["generate", "a star", "--steps=" + 5000 * "9"], "Exceeds the limit"),
        (["generate", "a star", "--base=toy/sdxl", f"--output={'x' * 300}.png"], "x.png"),
        (["train", "--config={}", "epochz: 7"], "Unknown option 'epochz'. Did you mean epochs"),
        (["evaluate", "attention", "--config={}", "encoders: a,b"], "write the values of a list in brackets"),
        (["generate", "--config={}", b"\xff\xfe\x00"], "can't decode byte 0xff"),
    ],
)
def test_one_message_and_no_traceback(capsys, tmp_path, arguments, message):
    """The last of the arguments is the content of a file of options, if they name one."""
    if "--config={}" in arguments:
        *arguments, content = arguments
        (tmp_path / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        arguments = [word.format(tmp_path / "c.yaml") for word in arguments]
    assert message in error(capsys, *arguments)


def test_train_then_export_then_evaluate(capsys, tmp_path, world):
    code, out, err = run(capsys, "train", *world, *QUICK, "--output", tmp_path / "run")
    assert code == 0, err
    assert f"debias-diffusion export --model {tmp_path / 'run'}" in out
    assert run(capsys, "export", "--model", tmp_path / "run", "--output", tmp_path / "export")[0] == 0
    encoders = ["--encoders", tmp_path / "run", world[5]]
    arguments = [*world[:4], *encoders, "--output", tmp_path / "scores", "--limit=10"]
    code, _, err = run(capsys, "evaluate", "retrieval", *arguments)
    assert code == 0 and len(json.loads((tmp_path / "scores" / "retrieval.json").read_text())["encoders"]) == 2, err
    code, out, err = run(capsys, "evaluate", "report", tmp_path / "scores")
    assert code == 0 and "1 results in 1 section" in out, err


def test_what_failed_though_all_was_usable_exits_with_1(capsys, tmp_path, monkeypatch):
    forward = AutoencoderKL._decode
    monkeypatch.setattr(AutoencoderKL, "_decode", lambda self, z, **rest: forward(self, z / 0, **rest))
    (tmp_path / "p.txt").write_text("a star\na ring")
    settings = ["--prompts", tmp_path / "p.txt", "--base=toy/sdxl", "--steps=1", "--device=cpu"]
    code, out, err = run(capsys, "generate", *settings, "--output", tmp_path / "out")
    assert code == 1 and err.splitlines()[-1].startswith("error: 2 of 2 images in ")
    assert "Left out: line 2, seed 1: its pixels are not finite" in out and not list((tmp_path / "out").glob("*.png"))


def test_yaml_is_read_overridden_and_printed(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 7\nbetas: [0.8, 0.9]\n")
    _, out, _ = run(capsys, "train", "--config", tmp_path / "c.yaml", "--epochs=5", "--print-config")
    printed = yaml.safe_load(out)
    assert (printed["epochs"], printed["betas"]) == (5, [0.8, 0.9])
    (tmp_path / "printed.yaml").write_text(out)
    assert run(capsys, "train", "--config", tmp_path / "printed.yaml", "--print-config")[1] == out


def test_extras_install_what_is_optional_and_commands_name_one():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert any(line.replace("-", "_").startswith(library) for line in extras[extra]), library
    assert {COMMANDS[name].extra for name in ("export", "generate")} == {""}
