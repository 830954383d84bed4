"""Every example of README.md, CONTRIBUTING.md and docs/: Python runs on tiny models, command lines are parsed by their
own parsers, and those that take seconds run, page by page in the order of the page.

Small random models stand under the names that the pages use. Half precision and the GPU are left out.
"""

import ast
import json
import os
import re
import shlex
import shutil
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import open_clip
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from diffusers import StableDiffusionXLPipeline
from helpers import tiny_flux
from helpers.demo_clients import opened_page
from helpers.drawing import same_picture
from helpers.released import DEEP, released
from helpers.single_files import original_layout
from helpers.text_encoders import hub_repository
from helpers.tiny_clip import registered, tiny_clip
from helpers.tiny_sdxl import build_tiny_sdxl, picture, sdxl_parts
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.run import get_args_parser
from transformers import CLIPTextModel

from debias_diffusion.app.arguments import parse
from debias_diffusion.app.cli import COMMANDS, EVALUATIONS, main
from debias_diffusion.app.command_help import accepted_names
from debias_diffusion.app.export import ExportConfig, export
from debias_diffusion.app.reproduce.papers import PaperTable, read_tables, read_yaml
from debias_diffusion.data import retrieval_sets
from debias_diffusion.data.toy_scenes import is_toy_scenes, read_toy_scenes
from debias_diffusion.errors import UserError, near_matches
from debias_diffusion.eval.text_image import classification
from debias_diffusion.interchange import load_two_tower
from debias_diffusion.methods import METHODS
from debias_diffusion.models.shipped import shipped
from debias_diffusion.pipelines.loading import load_sdxl

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))}
LANGUAGES = {"": "a drawing", "text": "not to be run", "mermaid": "a drawing", "bibtex": "tests/test_citation.py"}
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
STAND_INS = {SDXL: "sdxl-folder", "torch.float16": "torch.float32", '.to("cuda")': ""}
STAND_INS |= {"pipe.enable_model_cpu_offload()": "pipe.to('cpu')"}
STAND_INS |= {"black-forest-labs/FLUX.1-dev": "flux", "stabilityai/stable-diffusion-3-medium-diffusers": "sd3"}
LONG_PROMPT = "A street at night. " * 30
LENGTH = 248


@dataclass(frozen=True)
class Block:
    """A fenced block: the page's name, the number of its first line, its language, its text."""

    page: str
    line: int
    language: str
    code: str


def fenced(page: str, text: str) -> list[Block]:
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in matches]


BLOCKS = {name: fenced(name, path.read_text()) for name, path in PAGES.items()}


def with_stand_ins(code: str) -> str:
    for name, replacement in STAND_INS.items():
        code = code.replace(name, replacement)
    return code


# ---- command lines


def shell_commands(script: str) -> list[list[str]]:
    """The words of each command of a bash script; what the shell would fill in becomes 2."""
    script = _without_substitutions(script.replace("\\\n", " "))
    script = re.sub(r"\$\w+", "2", script)
    commands = []
    for line in _whole_lines(script):
        words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        words.whitespace_split, words.commenters = True, "#"
        commands.append([])
        for word in words:
            if set(word) <= set(";&|"):
                commands.append([])
            else:
                commands[-1].append(word)
    commands = [_without_prefix(command) for command in commands]
    inner = [shell_commands(command[-1]) for command in commands if command[-2:-1] == ["-c"]]
    return [*filter(None, commands), *(command for script in inner for command in script)]


def _without_substitutions(script: str) -> str:
    """With 2 for each $(...), however deep its parentheses are nested."""
    while (start := script.find("$(")) >= 0:
        depth, end = 1, start + 2
        while depth:
            depth += {"(": 1, ")": -1}.get(script[end], 0)
            end += 1
        script = f"{script[:start]}2{script[end:]}"
    return script


def _whole_lines(script: str) -> list[str]:
    """Lines, joined where a quotation goes on in the next one."""
    lines = [""]
    for line in script.splitlines():
        lines[-1] = f"{lines[-1]}\n{line}" if lines[-1] else line
        if lines[-1].partition("#")[0].count("'") % 2 == 0:
            lines.append("")
    return [line for line in lines if line]


def _without_prefix(words: list[str]) -> list[str]:
    """Without variables set for the command, and words that run the rest."""
    words = list(words)
    while words and (words[0] in ("do", "then", "exec") or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    if words[:1] == ["nice"]:
        words = words[3:]
    return words


def command_of(arguments: list[str]):
    """(the words that start a command of ours, its entry, its arguments)"""
    program, commands, rest = "debias-diffusion", COMMANDS, list(arguments)
    while isinstance(commands, dict):
        name = rest.pop(0)
        if name not in commands:
            raise UserError(f"{program} has no command {name!r}.{near_matches(name, commands)}")
        program, commands = f"{program} {name}", commands[name]
    return program, commands, rest


def options_of(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(import_module(f"debias_diffusion.{module}"), name)


def check_ours(arguments: list[str]) -> None:
    """As the command line reads them, up to where the command's work begins; toy names and benchmarks exist."""
    program, command, rest = command_of(arguments)
    options = options_of(command.options)
    # Checks of some options read the SDXL checkpoint.
    values = parse(program, options, [word.replace(SDXL, "toy/sdxl") for word in rest], command.example)
    options(**values)
    for name in ("base", "encoder", "encoder_2", "model", "encoders"):
        given = values.get(name) or []
        for model in [given] if isinstance(given, str) else given:
            shipped(model.rpartition(":")[2])
    check_toy_scenes(values.get("data") or "")
    if values.get("dataset"):
        known = classification.BENCHMARKS if command is EVALUATIONS["classification"] else retrieval_sets.BENCHMARKS
        assert set(values["dataset"].split(",")) <= known.keys()
    if command is COMMANDS["reproduce"] and values["target"] not in (None, "all", "claims", "evidence"):
        assert values["target"] in tables()


@cache
def check_toy_scenes(data: str) -> None:
    if is_toy_scenes(data):
        read_toy_scenes(data)


@cache
def tables() -> dict[str, PaperTable]:
    return read_tables(ROOT / "configs" / "papers")


def check_launched(parser, words: list[str]) -> None:
    """A launcher of several processes, by its own parser."""
    parsed = parser.parse_args(words)
    assert parsed.module and parsed.training_script in ("debias_diffusion", "debias_diffusion.app.cli")
    check_ours(parsed.training_script_args)


def check_script(words: list[str]) -> None:
    """A program of the repository: its options are those that its source names."""
    if words[0] == "-m":
        words = [word for word in words[2:] if word.endswith(".py")]
    source = (ROOT / words[0]).read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    known = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    assert not {word for word in words if word.startswith("--")} - known


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(words) <= targets


def check_pip(words: list[str]) -> None:
    settings = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^(\w+) = \[", settings.partition("\n[project.")[0], re.MULTILINE)
    assert words[0] == "install" and words[1] in (".", *(f".[{extra}]" for extra in extras))


PROGRAMS = {
    ("debias-diffusion",): check_ours,
    ("accelerate", "launch"): lambda words: check_launched(launch_command_parser(), words),
    ("torchrun",): lambda words: check_launched(get_args_parser(), words),
    ("python",): check_script,
    ("make",): check_make,
    ("pip",): check_pip,
}
SHELL = {"export", "for", "done", "wait", ".", "srun", "hf", ".ci/run"}


def check_command(words: list[str]) -> None:
    for start, check in PROGRAMS.items():
        if tuple(words[: len(start)]) == start:
            return check(words[len(start) :])
    assert words[0] in SHELL or re.match(r"[A-Z_]+=", words[0]), f"nothing here knows {words[0]!r}"


def sentences(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)


def inline_commands(start: str) -> list[list[str]]:
    """The words of the commands in the sentences of all pages that begin with `start`."""
    spans = re.findall(rf"`({start} [^`]+)`", "".join(map(sentences, PAGES)))
    return [shlex.split(span.partition(" | ")[0]) for span in spans]


@pytest.fixture
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def extended():
    """The method of docs/extending.md is registered, as its page has it."""
    (block,) = [block for block in BLOCKS["extending.md"] if block.language == "python"]
    exec(compile(block.code, block.page, "exec"), {"__name__": "predicting"})
    yield
    del METHODS["predicting"]


@pytest.mark.parametrize("page", [name for name in PAGES if "bash" in {block.language for block in BLOCKS[name]}])
def test_command_lines_are_understood(page, in_repository, extended):
    for block in BLOCKS[page]:
        for words in shell_commands(block.code) if block.language == "bash" else []:
            try:
                check_command(words)
            except (UserError, AssertionError, SystemExit, OSError) as error:
                pytest.fail(f"{page}, line {block.line}: {shlex.join(words)}: {error}")


def test_commands_in_sentences_have_options_that_exist(in_repository):
    """They may leave out what a command requires, and its command: "COMMAND"."""
    given = [words for words in inline_commands("debias-diffusion") if words[1] != "COMMAND" and len(words) > 3]
    assert len(given) > 9
    for words in given:
        program, command, rest = command_of(words[1:])
        flags = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
        assert flags <= spellings(options_of(command.options)), program
    scripts = inline_commands("python")
    assert len(scripts) > 4
    for words in scripts:
        if words[1] != "-m":
            check_script(words[1:])


def spellings(options: type) -> set[str]:
    """Names of options that a command takes, with _."""
    names = accepted_names(options).keys() | {"help", "config", "print_config"}
    return names | {f"no_{name}" for name in names} | ({"method"} if "method" in names else set())


FOREIGN = {"mixed_precision", "main_process_port", "dependency", "logdir"}  # accelerate's, SLURM's, TensorBoard's
FOREIGN |= {"student_context_length", "extended_context_length"}  # of TULIP


def test_options_in_sentences_exist():
    entries = [entry for entry in (*COMMANDS.values(), *EVALUATIONS.values()) if not isinstance(entry, dict)]
    known = FOREIGN.union(*(spellings(options_of(entry.options)) for entry in entries))
    for page in PAGES:
        spans = re.findall(r"`((?!python |make )[^`]*)`", sentences(page))
        flags = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", " ".join(spans)))
        assert {flag for flag in flags if flag.replace("-", "_") not in known} == set(), page


@pytest.mark.parametrize(
    "line",
    [
        "debias-diffusion train --config configs/debias-clip-vit-b16.yaml --epocs 3",
        "debias-diffusion train --config configs/debias-clip-vit-c16.yaml",
        "debias-diffusion train --config configs/debias-clip-vit-b16.yaml --recipe debias",
        "debias-diffusion generate 'a star' --base toy/sdxll",
        "debias-diffusion generate 'a star' --base toy/sdxl --steps many",
        "debias-diffusion reproduce table-S44 --plan",
        "debias-diffusion evaluate robust --encoders toy/clip",
        "debias-diffusion evaluate robustness --encoders toy/clap --data toy/test --output scores",
        "debias-diffusion evaluate robustness --encoders toy/clip --data toy/tests --output scores",
        "debias-diffusion evaluate retrieval --encoders toy/clip --dataset coco,docki --root data --output scores",
        "accelerate launch --multi_gpus -m debias_diffusion train --config configs/debias-clip-vit-b16.yaml",
        "accelerate launch -m debias_diffusion train --config configs/debias-clip-vit-b16.yaml --epocs 3",
        "srun bash -c 'X=1 torchrun --nnodes 2 \\\n -m debias_diffusion train --config configs/none.yaml'",
        "for i in $(seq $((2 * 3))); do nice -n 9 debias-diffusion app --prot 1 & done; wait  # it's ours",
        "python benchmarks/policies.py --promts 3",
        "python benchmarks/none.py",
        "make tests",
        'pip install ".[trains]"',
        "frobnicate --all",
    ],
)
def test_a_wrong_command_line_is_seen(line, in_repository, capsys):
    with pytest.raises((UserError, AssertionError, SystemExit, OSError)):
        for words in shell_commands(line):
            check_command(words)


# ---- blocks of other languages


def test_every_block_names_its_language_and_data_can_be_read(tmp_path):
    for page, blocks in BLOCKS.items():
        assert PAGES[page].read_text().count("```") == 2 * len(blocks), page
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            assert yaml.safe_load(block.code)
            (file := tmp_path / "table-X.yaml").write_text(block.code)
            assert read_yaml(file, PaperTable).rows  # the one kind of YAML that the pages show
        else:
            assert block.language in {"python", "bash", *LANGUAGES}, f"{block.page}, line {block.line}"


# ---- examples that run

WIDTH = DEEP["text_cfg"]["width"]


@contextmanager
def published(folder: Path):
    """Files as they are published, in a folder, and their models in open_clip's list."""
    models = {name: DEEP | {"quick_gelu": True} for name in ("ViT-B-16-quickgelu", "ViT-L-14-quickgelu")}
    models["ViT-L-14"] = DEEP
    prefixed, _ = released(folder, "text.")
    prefixed.rename(kept := folder / "kept.pt")
    plain, _ = released(folder, "")
    plain.rename(folder / "longclip-L.pt")
    kept.rename(folder / "debias_vitb_3e.pt")
    shutil.copy(folder / "longclip-L.pt", hub_repository(folder / "cache", "BeichenZhang/LongCLIP-L"))
    with registered(folder / "models", **models):
        torch.save(open_clip.CLIP(**deepcopy(DEEP)).state_dict(), folder / "laion-vit-l-14.pt")
        build_tiny_sdxl(folder / "sdxl-folder", text_width=WIDTH)
        for weights in (folder / "sdxl-folder").glob("*/*.safetensors"):
            os.link(weights, weights.with_name(weights.name.replace(".safetensors", ".fp16.safetensors")))
        save_file(original_layout(sdxl_parts(WIDTH)), folder / "checkpoint.safetensors")
        yield


def trained(folder: Path) -> None:
    """What the commands of other pages leave: training runs, an exported encoder, an SDXL for it, prompts."""
    load_two_tower(f"ViT-L-14-quickgelu:{folder / 'longclip-L.pt'}").save(mine := folder / "runs" / "mine")
    for name in ("debias-clip-vit-l14", "photographs"):
        shutil.copytree(mine, folder / "runs" / name, copy_function=os.link)
    export(ExportConfig(str(mine), str(folder / "runs" / "encoder")))
    for name in ("runs/tiny-sdxl", "runs/both"):
        source = folder / ("runs/encoder" if name == "runs/both" else "sdxl-folder")
        shutil.copytree(source, folder / name, copy_function=os.link)
    (folder / "prompts.txt").write_text("a red star\na blue ring\n")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        with published(folder):
            trained(folder)
            yield folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """A copy of the models, the current folder of a page."""
    shutil.copytree(models, copy := tmp_path / "page", copy_function=os.link)
    monkeypatch.chdir(copy)
    return copy


QUICK = ("export", "comfyui", "generate")


def runs_here(arguments: list[str]) -> bool:
    """Whether a command takes seconds, with models that are there."""
    options = dict(pairwise(arguments))
    if arguments[0] == "reproduce":
        return "--list" in arguments
    given = [options[name] for name in ("--model", "--base", "--encoder") if name in options]
    there = (name.startswith(("toy/", "BeichenZhang")) or Path(name.partition(":")[0]).exists() for name in given)
    return arguments[0] in QUICK and "--push-to-hub" not in arguments and all(there)


def run_command(words: list[str]) -> None:
    if words[0] != "debias-diffusion" or not runs_here(words[1:]):
        return
    few = ["--steps", "1"] if words[1] == "generate" and "--steps" not in words else []
    main([*words[1:], *few])


def follow(page: str, names: dict) -> list[dict]:
    """Runs a page. Returns the names after each of its Python blocks."""
    after = []
    for block in BLOCKS[page]:
        code = with_stand_ins(block.code)
        if block.language == "bash":
            for words in shell_commands(code):
                run_command(words)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), names)
            after.append(dict(names))
    return after


def check_pipelines(after: list[dict]) -> None:
    """Every SDXL pipeline that a page makes reads a long prompt to its end."""
    for names in after:
        if "pipe" in names:
            names["pipe"].set_progress_bar_config(disable=True)
            images = [
                names["pipe"](text, num_inference_steps=1, generator=torch.Generator().manual_seed(0)).images[0]
                for text in (LONG_PROMPT, f"{LONG_PROMPT}A red bus passes.")
            ]
            assert images[0].size == (64, 64) and images[0].tobytes() != images[1].tobytes()


def test_readme(folder):
    after = follow("README.md", {})
    check_pipelines(after)
    assert [names["pipe"].text_encoder.config.max_position_embeddings for names in after] == [77, LENGTH, LENGTH]
    assert after[0]["image"].size == (64, 64)
    assert all((folder / name).is_file() for name in ("star.png", "runs/coffee.png"))


def test_existing_weights(folder):
    after = follow("existing-weights.md", {})
    check_pipelines(after[:1])
    images = [Image.open(folder / f"{name}.png") for name in ("street", "street-in-chunks", "checkpoint")]
    assert len({image.tobytes() for image in images}) == 3 and images[0].size == (64, 64)
    encoder = CLIPTextModel.from_pretrained(folder / "long-clip-l", subfolder="text_encoder")
    table = load_file(folder / "long_clip_l.safetensors")["text_model.embeddings.position_embedding.weight"]
    assert len(table) == LENGTH and torch.equal(encoder.state_dict()["embeddings.position_embedding.weight"], table)
    assert [names["model"].context_length for names in after[1:]] == [LENGTH, LENGTH, 77]
    torch.testing.assert_close(after[1]["probabilities"].sum(), torch.tensor(1.0))
    assert after[1]["text_features"].shape == (2, DEEP["embed_dim"])


@pytest.mark.filterwarnings("ignore:.*does not name its activation")
def test_an_encoder_of_another_width_is_refused_by_generate(folder, tmp_path):
    narrow = build_tiny_sdxl(tmp_path / "sdxl")
    with pytest.raises(UserError, match="width"):
        load_sdxl(narrow, "debias_vitb_3e.pt", torch.device("cpu"))


def test_encoders(folder):
    picture().save("star.png")
    loaded, both, blocks, diffusers, text, clip, clip_open = follow("encoders.md", {})
    assert loaded["text_encoder"].config.max_position_embeddings == LENGTH
    assert both["features"].shape == (1, DEEP["embed_dim"])
    assert blocks["eot_states"].shape == (1, 2, WIDTH) and blocks["states"].shape == (1, LENGTH, WIDTH)
    assert blocks["cls_states"].shape == (1, 2, DEEP["vision_cfg"]["width"])
    check_pipelines([diffusers])
    assert text["states"].shape == (1, LENGTH, WIDTH) and clip["similarity"].shape == (1, 2)
    assert clip_open["tokenizer"](["a cat"]).shape == (1, LENGTH)
    assert (folder / "ComfyUI" / "models" / "text_encoders" / "debias_clip_l.safetensors").is_file()


@pytest.fixture
def loaded_sdxl(models):
    """The pipeline that a reader has."""
    return StableDiffusionXLPipeline.from_pretrained(models / "sdxl-folder", add_watermarker=False)


def test_pipelines(folder, loaded_sdxl):
    after = follow("pipelines.md", {"pipe": loaded_sdxl, "prompt": LONG_PROMPT})
    check_pipelines(after[:2])
    assert after[0]["image"].size == after[2]["image"].size == (64, 64)


def test_faq(folder, loaded_sdxl):
    last = follow("faq.md", {"pipe": loaded_sdxl, "long_prompt": LONG_PROMPT})[-1]
    assert last["image"].size and last["layout"].tokens == 150 and last["layout"].windows[0] > 1


def test_other_pipelines(tmp_path, monkeypatch):
    """Only CLIP-L can tell two prompts apart: the T5 gets another text."""
    monkeypatch.chdir(tmp_path)
    tiny_clip(context_length=LENGTH).save("runs/debias-clip-vit-l14")
    export(ExportConfig("runs/debias-clip-vit-l14", "runs/encoder"))
    tiny_flux.build_tiny_flux(tmp_path / "flux")
    tiny_flux.build_tiny_sd3(tmp_path / "sd3")
    for names, text in zip(follow("other-pipelines.md", {}), ("prompt_2", "prompt_3"), strict=True):
        names["pipe"].set_progress_bar_config(disable=True)
        assert not same_picture(names["pipe"], **{text: "a cat"}, max_sequence_length=64)


def test_app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    with opened_page(base="toy/sdxl", encoders=["toy/clip"]) as (_, url):
        monkeypatch.setitem(STAND_INS, "http://127.0.0.1:7860", url)
        last = follow("app.md", {})[-1]
    assert last["images"][0]["label"] == "toy/clip" and last["counted"]["count"] > 5
    assert last["read"]["attention"].keys() == {"toy/clip"}
    assert Image.open("image.png").size == (48, 48)


def test_extending(extended):
    (after,) = follow("extending.md", {"__name__": "predicting"})
    assert METHODS["predicting"].alpha == after["Predicting"].alpha == 0.5


def test_generate(folder):
    follow("generate.md", {})
    assert len(list(Path("pictures").glob("0*.png"))) == 2


# Pages of which nothing but a file is checked.
OTHERS = {"command-line.md": "star.png", "comfyui.md": "ComfyUI/custom_nodes/long_prompt/__init__.py"}
OTHERS |= {"api.md": "", "reproduce.md": ""}


@pytest.mark.parametrize(("page", "written"), OTHERS.items())
def test_other_pages(page, written, folder, capsys):
    follow(page, {})
    assert (folder / written).exists()
    assert page != "reproduce.md" or "table-S4" in capsys.readouterr().out


def test_every_page_with_python_is_followed():
    followed = set(re.findall(r'\bfollow\("([\w.-]+)"', Path(__file__).read_text())) | OTHERS.keys()
    assert {page for page, blocks in BLOCKS.items() if "python" in {block.language for block in blocks}} <= followed
