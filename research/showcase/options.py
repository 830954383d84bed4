"""Options of `showcase`."""

from dataclasses import dataclass

from debias_diffusion.app.prompt_options import CheckConfig
from debias_diffusion.limits import between


@dataclass(kw_only=True)
class ShowcaseConfig(CheckConfig):
    """Draw 100 long prompts in four ways, on a page where a person marks what is right in them.

    Attributes:
        output: Folder to write: images, index.html, mark.html, contact-sheet.png, showcase.json.
        limit: How many of the 100 prompts are drawn.
        marks: File that mark.html has saved: then showcase.json counts facts right by way and sentence.
        judge: Multimodal model on --server that marks all facts, too, as in `evaluate following`. With marks, how often
            it agrees with them is printed.
        server: Address of an OpenAI-compatible server that gives top_logprobs, such as http://localhost:8000.
    """

    output: str = "runs/showcase"
    limit: between(int, 1, 100) = 100
    marks: str | None = None
    judge: str | None = None
    server: str | None = None
