"""Answers to the questions of DPG-Bench: the images asked about, and the VQA model."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForVisualQuestionAnswering, AutoProcessor

from debias_diffusion.data.images import UnreadableImage, open_image
from debias_diffusion.encoders import may_be_hub_id
from debias_diffusion.errors import UserError, reason
from debias_diffusion.files import bytes_digest, sha256

from ..options import DpgBenchConfig
from ..session import ResultCache
from .dpg_questions import DpgBench

GRID = 2  # images on a side of a published file
# (prompt's id, image from 0, proposition's number)
Key = tuple[str, int, int]
# An image and questions about it -> an answer to each.
Ask = Callable[[Image.Image, Sequence[str]], list[str]]


def find_pictures(folder: str, items: Iterable[str], images_per_prompt: int) -> dict[str, list[Path]]:
    """The files of each prompt's images: one for each in a folder named as the prompt, or one for all.

    Raises:
        UserError: a prompt has no images, or another number of them.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"The folder of images {folder!r} is not there.")
    singles: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") and not path.name.startswith("."):
            singles.setdefault(path.stem, path)
    by_item, faults = {}, []
    for item in items:
        if (root / item).is_dir():
            files = sorted(path for path in (root / item).iterdir() if not path.name.startswith("."))
            if len(files) != images_per_prompt:
                faults.append(f"the folder {item} holds {len(files)} files")
        elif item in singles and images_per_prompt in (1, GRID**2):
            files = [singles[item]]
        else:
            faults.append(f"there is neither a folder {item} nor a file {item}.png")
            continue
        by_item[item] = files
    if faults:
        raise UserError(
            f"{folder!r} does not hold the images of {len(faults)} prompts: {faults[0]}. Each prompt needs "
            f"images_per_prompt={images_per_prompt} images: a file for each in a folder named as the prompt, or (for "
            "4) one file with a grid of 2 x 2."
        )
    return by_item


def open_picture(files: Sequence[Path], index: int, images_per_prompt: int) -> Image.Image:
    """One image as RGB: a file, or a quarter of a grid, in the published script's order, row by row.

    Raises:
        UserError: the file cannot be read, or a grid's sides are odd.
    """
    single = len(files) == 1 and images_per_prompt > 1
    path = _file(files, index)
    try:
        image = open_image(path)
        if not single:
            return image
        if image.width % GRID or image.height % GRID:
            raise UnreadableImage(f"{image.width} x {image.height} pixels are no grid of {GRID} x {GRID} images")
    except UnreadableImage as error:
        raise UserError(
            f"The image {str(path)!r} cannot be used: {reason(error)}. Generate it again; the answers so far are kept."
        ) from error
    width, height = image.width // GRID, image.height // GRID
    row, column = divmod(index, GRID)
    return image.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))


class VqaModel:
    """A ViLT or a BLIP of transformers, by its folder or hub id, that answers questions about an image.

    Raises:
        UserError: the model cannot be loaded, lacks weights, or is neither ViLT nor BLIP.
    """

    def __init__(self, model: str, device: torch.device):
        try:
            if not os.path.isdir(model) and not may_be_hub_id(model):
                raise ValueError("it is not there")
            self.processor = AutoProcessor.from_pretrained(model)
            # Files other than safetensors are read with weights_only=True.
            loaded, info = AutoModelForVisualQuestionAnswering.from_pretrained(
                model, dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"]:
                missing = sorted(info["missing_keys"])
                raise ValueError(f"it lacks {len(missing)} of the model's weights, such as {missing[0]}")
            kind = loaded.config.model_type
            if kind not in ("vilt", "blip"):
                raise ValueError(f"it is a {kind}, which is asked in another way")
        except Exception as error:  # whatever a wrong folder or a failed download raises
            raise UserError(
                f"The VQA model {model!r} could not be loaded: {reason(error)}. Give --vqa a folder or hub id of a "
                "ViLT or BLIP for visual question answering, such as dandelin/vilt-b32-finetuned-vqa or "
                "Salesforce/blip-vqa-base, with its processor's files."
            ) from error
        self.model, self.device = loaded.to(device).eval(), device

    def __call__(self, image: Image.Image, questions: Sequence[str]) -> list[str]:
        """The answer to each question, in lower case, without a full stop, independent of the others."""
        # Grouped by length, because transformers' BLIP reads padding as part of the question.
        groups: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            groups.setdefault(len(self.processor.tokenizer(question)["input_ids"]), []).append(index)
        answers = [""] * len(questions)
        for group in groups.values():
            for index, answer in zip(group, self._answer(image, [questions[i] for i in group]), strict=True):
                answers[index] = answer.strip().lower().rstrip(".")
        return answers

    @torch.inference_mode()
    def _answer(self, image: Image.Image, questions: list[str]) -> list[str]:
        """The answers to questions of one length."""
        images = [image] * len(questions)
        inputs = self.processor(images=images, text=questions, truncation=True, return_tensors="pt").to(self.device)
        if self.model.config.model_type == "vilt":
            # It reads its patches in a random order, which changes the rounding.
            with torch.random.fork_rng():
                torch.manual_seed(0)
                best = self.model(**inputs).logits.argmax(dim=-1).tolist()
            return [self.model.config.id2label[index] for index in best]
        ids = self.model.generate(**inputs, max_new_tokens=10, do_sample=False, num_beams=1)
        return self.processor.batch_decode(ids, skip_special_tokens=True)


def answer(
    cache: ResultCache,
    bench: DpgBench,
    files: Mapping[str, list[Path]],
    config: DpgBenchConfig,
    vqa: str,
    load: Callable[[], Ask],
    title: str,
) -> dict[Key, bool]:
    """Whether each answer is yes. Asks only about images that have no answers yet.

    Args:
        cache: keeps all answers about an image.
        files: see `find_pictures`.
        vqa: digest of the VQA model.
        load: gives the model; called once an image is to be asked about.
        title: of the progress bar.
    """
    yes, count = {}, config.images_per_prompt
    images = [(item, index) for item in bench.propositions for index in range(count)]
    for item, index in tqdm(images, desc=f"ask, {title}"):
        questions = [proposition.question for proposition in bench.propositions[item]]

        def ask(item: str = item, index: int = index, questions: Sequence[str] = questions) -> dict:
            model, image, answers = load(), open_picture(files[item], index, count), []
            for start in range(0, len(questions), config.batch_size):
                answers += model(image, questions[start : start + config.batch_size])
            return {"answers": answers}

        file = _file(files[item], index)
        depends = {"vqa": vqa, "image": sha256(file), "index": index, "count": count, "questions": questions}
        answers = cache.noted(answers_of(vqa), depends, ask)["answers"]
        for proposition, text in zip(bench.propositions[item], answers, strict=True):
            yes[item, index, proposition.number] = text == "yes"
    return yes


def answers_of(vqa: str) -> str:
    """The kind of result in the cache of the answers of one VQA model."""
    return f"answers-{bytes_digest([vqa.encode()])[:12]}"


def _file(files: Sequence[Path], index: int) -> Path:
    return files[0] if len(files) == 1 else files[index]
