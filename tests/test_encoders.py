"""Names of encoders: every spelling, reading, label and digest, and what is refused."""

import json

import pytest
import torch
from helpers.hub_server import COMMIT, served_hub
from helpers.released import CAPTIONS, released
from helpers.text_encoders import hub_repository, long_clip
from helpers.tiny_clip import tiny_clip
from huggingface_hub import constants

from debias_diffusion.encoders import hub
from debias_diffusion.encoders.hub import find_hub_file
from debias_diffusion.encoders.resolve import Kind, Model
from debias_diffusion.encoders.spec import EncoderSpec, labels, load_text_encoder, load_two_tower
from debias_diffusion.encoders.text_encoders import export_text_encoder, prefixed_state
from debias_diffusion.errors import UserError
from debias_diffusion.files import path_digest
from debias_diffusion.jobs import Job
from debias_diffusion.pipelines.rendering.checkpoints import Checkpoint
from debias_diffusion.toyworld.shipped import WEIGHTS

parse = EncoderSpec.parse


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with one of everything; nothing in it can be loaded."""
    monkeypatch.chdir(tmp_path)
    open_clip_folders = "folder run/last run/best unfinished/best ablated/last aligned/last".split()
    files = [f"{folder}/open_clip_config.json" for folder in open_clip_folders]
    exported = "aligned/encoder_2 fitted/encoder second/encoder_2 exported".split()
    files += [f"{folder}/text_encoder/config.json" for folder in exported]
    for file in (*files, "ablated/ablation.json", "weights.pt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    for run, command in (("empty", "train"), ("second", "train"), ("searching", "ablate")):
        with Job.open(tmp_path / run, command):
            pass
    return tmp_path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache on this machine; the hub itself cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "kind", "location"),
    [
        ("original", Kind.ORIGINAL, "original"),
        ("toy/clip", Kind.OPEN_CLIP, str(WEIGHTS / "clip")),
        ("toy/debias-clip", Kind.DIFFERENCE, str(WEIGHTS / "debias-clip")),
        ("unfinished", Kind.OPEN_CLIP, "unfinished/best"),
        ("ablated", Kind.ABLATION, "ablated"),
        ("aligned", Kind.OPEN_CLIP, "aligned/last"),
        ("fitted", Kind.TRANSFORMERS, "fitted/encoder"),
        ("second", Kind.TRANSFORMERS, "second"),
        ("weights.pt", Kind.FILE, "weights.pt"),
        ("owner/name_v1.1", Kind.HUB, "owner/name_v1.1"),
        ("owner/name@v1", Kind.HUB, "owner/name@v1"),
        ("hf-hub:owner/name@v1", Kind.OPEN_CLIP, "hf-hub:owner/name@v1"),
    ],
)
def test_a_name_means_what_lies_there(here, name, kind, location):
    model = Model(kind, location)
    assert parse(name) == EncoderSpec(name, "overlap", model)
    for reading in ("overlap", "separate", "cut"):
        assert parse(f"{reading}:{name}") == EncoderSpec(name, reading, model) == parse(name, reading)


def test_a_model_is_named_with_its_weights(here):
    assert parse("aligned").fitted_second == parse("local-dir:aligned").fitted_second == "aligned/encoder_2"
    assert parse("run").fitted_second is parse("ViT-B-16:openai").fitted_second is None
    for typed, weights in (("openai", "openai"), ("weights.pt", "weights.pt"), ("none", None)):
        model = Model(Kind.OPEN_CLIP, "ViT-B-16-quickgelu", weights)
        expected = EncoderSpec(f"ViT-B-16-quickgelu:{typed}", "cut", model)
        assert parse(f"cut:ViT-B-16-quickgelu:{typed}") == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("orignal", "Did you mean original"),
        ("toy/clpi", "Did you mean toy/clip"),
        ("overlp:toy/clip", "Did you mean overlap"),
        ("ViT-B-16-quickgelu", "Give ViT-B-16-quickgelu:WEIGHTS, .*none"),
        ("ViT-B-16:nowhere.pt", "the file is not there"),
        ("folder:openai", "leave out 'openai'"),
        ("empty", "has not ended"),
        ("searching", "has not ended"),
    ],
)
def test_what_is_not_there_is_refused(here, name, message):
    with pytest.raises(UserError, match=message):
        parse(name)


def test_a_digest_is_of_the_files_that_are_loaded_and_of_what_loading_reads_beside_them(here):
    (here / "weights.pt").write_bytes(b"some weights")
    assert parse("run").digest == parse("separate:local-dir:run/last").digest == path_digest(here / "run" / "last")
    assert parse("ViT-L-14-quickgelu:openai").digest == "ViT-L-14-quickgelu:openai"
    named = ("weights.pt", "ViT-L-14:weights.pt", "ViT-L-14-quickgelu:weights.pt", "exported/text_encoder")
    tokenizer = here / "exported" / "tokenizer"
    seen = [[parse(name).digest for name in named]]
    for file in (here / "weights.pt", here / "config.json", here / "tokenizer" / "merges.txt", tokenizer / "a.json"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        seen.append([parse(name).digest for name in named])
    assert [len(set(digests)) for digests in zip(*seen, strict=True)] == [4, 4, 4, 2]
    assert len({digest for digests in seen for digest in digests}) == 14
    (here / "elsewhere.txt").write_text("")
    assert [parse(name).digest for name in named] == seen[-1]


def test_a_hub_id_has_the_digest_of_its_commit_before_and_after_the_download(cache):
    with served_hub({}) as asked:
        before = parse("some/encoder").digest
        assert parse("hf-hub:some/clip@v1").digest == f"hf-hub:some/clip@v1@{COMMIT}"
        assert asked == ["/api/models/some/encoder", "/api/models/some/clip/revision/v1"]
        hub_repository(cache, "some/encoder")
        assert parse("some/encoder").digest == before == f"some/encoder@{COMMIT}" and len(asked) == 2
    assert Checkpoint("some/encoder", "some/encoder").digest == before


def test_a_text_encoder_is_loaded_of_a_revision_in_a_dtype_on_a_device(cache):
    folders = [hub_repository(cache, "some/encoder", digit * 40, name) for digit, name in (("0", "main"), ("1", "v1"))]
    backbones = [long_clip(), long_clip()]
    with torch.no_grad():
        backbones[1].text.tower.positional_embedding.add_(1)
    for backbone, folder in zip(backbones, folders, strict=True):
        export_text_encoder(backbone, folder)

    def positions(name, **options):
        encoder, _ = load_text_encoder(name, **options)
        return prefixed_state(encoder)["text_model.embeddings.position_embedding.weight"]

    tables = [backbone.text.tower.positional_embedding for backbone in backbones]
    assert torch.equal(positions("some/encoder"), tables[0])
    for named in ({"revision": "v1"}, {"revision": "1" * 40}):
        assert torch.equal(positions("some/encoder", **named), tables[1])
    assert torch.equal(positions("some/encoder@v1"), tables[1])
    assert parse("some/encoder@v1").digest == "some/encoder@v1@" + "1" * 40
    halved = positions("some/encoder", dtype=torch.float16, device="meta")
    assert (halved.dtype, halved.device.type) == (torch.float16, "meta")
    for name in (folders[0], "toy/clip"):
        with pytest.raises(UserError, match="revision='v1' is of a hub id"):
            load_text_encoder(name, revision="v1")
    backbones[1].save(hub_repository(cache, "some/clip", "1" * 40, "v1"))
    table = load_two_tower("hf-hub:some/clip@v1").text.tower.positional_embedding
    assert torch.equal(table, tables[1])


def test_the_context_length_is_read_without_loading_the_encoder(cache, tmp_path, long_clip_folder, monkeypatch):
    """A comparison of hub ids labels them before it downloads gigabytes."""
    export_text_encoder(long_clip(), tmp_path / "exported")
    clip = json.dumps({"text_config": {"max_position_embeddings": 77}})
    (hub_repository(cache, "some/clip") / "config.json").write_text(clip)
    monkeypatch.setattr(EncoderSpec, "load_text_encoder", None)
    for name in (long_clip_folder, tmp_path / "exported", tmp_path / "exported/text_encoder"):
        assert parse(name).context_length == 248
    for name in ("toy/clip", "original", "some/clip", "ViT-L-14-quickgelu:openai"):
        assert parse(name).context_length == 77


def test_labels_are_short_and_unique_and_say_how_prompts_are_read(tmp_path):
    for name in ("a/best", "b/best", "_mine"):
        tiny_clip().save(tmp_path / name)

    def labelled(*names, **options):
        return labels([parse(name.replace("~", str(tmp_path))) for name in names], **options)

    own = ["SDXL's own, overlapping chunks", "toy/clip, separate chunks"]
    assert labelled("original", "separate:toy/clip") == own
    trained = ["toy/long-clip", "toy/debias-clip, separate chunks", "toy/long-clip, cut at 77 tokens"]
    assert labelled("toy/long-clip", "separate:toy/debias-clip", "cut:toy/long-clip") == trained
    assert labelled("~/a/best", "toy/clip", readings=False) == ["best", "toy/clip"]
    assert labelled("~/a/best", "~/b/best", "~/_mine", readings=False) == ["a/best", "b/best", f"{tmp_path.name}/_mine"]
    assert labelled("~/_mine", readings=False) == ["./_mine"]


# ---- hub repositories of one file of weights, laid out as Long-CLIP's is: `longclip-L.pt` and a README


def test_a_repositorys_one_file_is_a_text_encoder_and_its_towers_are_named(known, cache, tmp_path):
    file, features = released(tmp_path, "")
    folder = hub_repository(cache, "some/clip")
    file.rename(folder / "longclip-tiny.pt")
    (folder / "README.md").write_text("# Long-CLIP\n")
    with pytest.raises(UserError, match="ViT-L-14-quickgelu:.*longclip-tiny.pt"):
        load_two_tower("some/clip")
    two_tower = load_two_tower(f"deep-quickgelu:{folder / 'longclip-tiny.pt'}")
    torch.testing.assert_close(two_tower.encode_text(two_tower.tokenize(CAPTIONS)), features, rtol=0, atol=1e-4)
    encoder, tokenizer = load_text_encoder("some/clip")
    assert (encoder.config.max_position_embeddings, tokenizer.model_max_length) == (248, 248)


def test_the_hub_is_asked_for_the_list_and_the_one_file(cache):
    files = {"longclip-L.pt": b"weights", "README.md": b"", ".gitattributes": b"", "images/a.bin": b""}
    with served_hub(files) as asked:
        found = find_hub_file("BeichenZhang/LongCLIP-L")
        assert found.name == "longclip-L.pt" and found.read_bytes() == b"weights"
        assert asked[0].startswith("/api/models/") and all(path.endswith("/longclip-L.pt") for path in asked[1:])
        files["longclip-L.pt"] = None
        with pytest.raises(UserError, match="'some/files' could not be loaded: "):
            load_two_tower("some/files")
        files["a-smaller-one.safetensors"] = b""
        hub._repository.cache_clear()
        with pytest.raises(UserError, match="a-smaller-one.safetensors, longclip-L.pt"):
            load_text_encoder("some/files")
