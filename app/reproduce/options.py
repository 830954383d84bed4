"""Settings of `reproduce`."""

from dataclasses import dataclass

from debias_diffusion.errors import UserError
from debias_diffusion.eval.options import check_output
from debias_diffusion.limits import check_seeds


@dataclass
class ReproduceConfig:
    """Regenerate a table or figure of the papers beside the published numbers, or test their claims.

    Everything finished is kept: the same command continues. Several processes started with the same command on one
    output folder share the work. Without a GPU, or for the toy world, --device cpu.

    Attributes:
        target: table-S4 and the like as --list names them, claims, or all; several with commas between them. evidence
            only renders the page of the claims from --results, and trains nothing.
        world: real, the papers' data and weights; or toy, the same comparisons in the toy world.
        root: Folder of the real data, see docs/reproduce.md.
        output: Folder for trainings, results and tables (table-S4.md, table-S4.json, claims.json).
        seeds: How many seeds, from 0.
        seed_list: The seeds instead, as 0,2.
        papers: Folder of the tables' settings and published numbers.
        device: Device to run on: cpu, or null for cuda where there is one.
        results: JSON file of the claims' results: claims writes it, too, and evidence reads it (by default
            benchmarks/results/claims.json).
        write: Page that claims writes, too, and evidence writes (by default docs/evidence.md).
        list: Name every table and figure, what it needs and whether it is here.
        plan: Print what would run and what it costs, and do nothing.
        finished: Decide the claims by what is finished, and run nothing: each by the seeds that all its
            models have, at least three if so many are wanted.
    """

    target: str | None
    world: str = "real"
    root: str = "data"
    output: str = "runs/papers"
    seeds: int = 1
    seed_list: str | None = None
    papers: str = "configs/papers"
    device: str | None = None
    results: str | None = None
    write: str | None = None
    list: bool = False
    plan: bool = False
    finished: bool = False

    def __post_init__(self):
        check_output(self.output)
        if self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}, but must be at least 1.")
        check_seeds(min(self.numbers), max(self.numbers))
        if self.target is None and not self.list:
            raise UserError(
                "Nothing is named. Give a table, such as `reproduce table-S4`, or `reproduce claims`; "
                "`reproduce --list` names all."
            )
        if self.finished and self.target != "claims":
            raise UserError(f"--finished is for `reproduce claims`, but the target is {self.target}. Leave it out.")

    @property
    def numbers(self):
        """The seeds, ascending."""
        if self.seed_list is None:
            return [*range(self.seeds)]
        parts = [part.strip() for part in self.seed_list.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise UserError(f"seed_list is {self.seed_list!r}, but must be whole numbers with commas, such as 0,2.")
        return sorted({int(part) for part in parts})
