"""The command line; ``vkjit --help`` lists the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import vkjit as vj
from vkjit.errors import ArgumentError, VkjitError

USER_FAULT = 2
"""Exit code of a wrong call, config or file."""
DIVERGED = 3
"""Exit code of a training run that gave itself up."""
ALARM = 4
"""Exit code of a training run whose numbers cannot be true."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class AdapterFormat(StrEnum):
    """Formats that `export` writes."""

    peft = "peft"
    gguf = "gguf"


app = typer.Typer(
    name="vkjit",
    help="Compile array programs; fine-tune language models with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _message(error: VkjitError) -> str:
    """The message without the line of the trainer that called the library."""
    return str(error).split("\n  at ")[0]


def _tell(message: str) -> None:
    """Prints an error to the standard error stream."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"error: {message}", style="red", markup=False, highlight=False)


def _clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Prints an error of vkjit or of a file as one message and exits with code 2: no traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except VkjitError as error:
            _tell(_message(error))
            raise typer.Exit(USER_FAULT) from error
        except OSError as error:
            where = error.filename or "a file"
            _tell(
                f"cannot read or write {where}: {error.strerror or error}, expected a readable "
                "file or a writable folder with free space; correct that and repeat the command "
                "(a training run goes on from its checkpoint with --resume)"
            )
            raise typer.Exit(USER_FAULT) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error

    return wrapped


@app.command()
@_clear_errors
def train(  # noqa: PLR0913  the flags of the command
    config: Annotated[Path, typer.Argument(help="TOML file of the run.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, deleting the folder's checkpoints.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Replaces train.steps; shortens the warm-up to fit."),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the data, token by token, and train nothing.")
    ] = False,
    records: Annotated[int, typer.Option(min=0, help="Records that --dry-run shows.")] = 3,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the memory that it needs, and train nothing.")
    ] = False,
) -> None:
    """Fine-tune a model with low-rank adapters, as a TOML file says."""
    # The trainer's libraries take a second to import, which `vkjit info` need not wait for.
    from vkjit_models.lora_sft.config import load_config  # noqa: PLC0415  slow import

    if dry:
        from vkjit_models.lora_sft.dry_run import dry_run  # noqa: PLC0415  slow import

        dry_run(load_config(config, steps=steps), Console(), records)
        return
    from vkjit_models.lora_sft import train as trainer  # noqa: PLC0415  slow import
    from vkjit_models.lora_sft.alarms import AlarmError  # noqa: PLC0415  slow import

    if plan:
        trainer.plan(load_config(config, steps=steps))
        return
    run = trainer.train
    try:
        result = run(load_config(config, steps=steps), resume=resume, overwrite=overwrite)
    except AlarmError as error:
        raise typer.Exit(ALARM) from error  # the run has printed it
    if result.stop is not None:
        raise typer.Exit(DIVERGED)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@_clear_errors
def sweep(
    config: Annotated[Path, typer.Argument(help="TOML file of the sweep.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew, deleting the folder's runs.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Replaces train.steps in all runs.")
    ] = None,
) -> None:
    """Run a training for each combination of values, and say which factor caused what."""
    from vkjit_models.common.lock import sole_user  # noqa: PLC0415  slow import
    from vkjit_models.lora_sft.sweep import sweep as run  # noqa: PLC0415  slow import
    from vkjit_models.lora_sft.sweep_config import load_sweep  # noqa: PLC0415  slow import

    chosen = load_sweep(config, steps=steps)
    with sole_user(chosen.folder):
        result = run(chosen, Console(soft_wrap=True), overwrite=overwrite)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
@_clear_errors
def report(folder: Annotated[Path, typer.Argument(help="Folder of a training run.")]) -> None:
    """Write report.html of a training run anew, from the files in its folder."""
    from vkjit_models.lora_sft.page import write_report  # noqa: PLC0415  slow import

    Console(soft_wrap=True).print(str(write_report(folder)), markup=False, highlight=False)


@app.command()
@_clear_errors
def dataset(  # noqa: PLR0913  the flags of the command
    source: Annotated[
        Path | None,
        typer.Argument(help="Folder with Python files; default: the standard library."),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="File of JSON lines to write.")],
    seed: Annotated[int, typer.Option(help="Chooses files, functions and wordings.")] = 0,
    files: Annotated[int | None, typer.Option(min=1, help="Files to use, at most.")] = None,
    functions: Annotated[
        int, typer.Option("--functions-per-file", min=0, help="Functions asked about, of each.")
    ] = 2,
    code: Annotated[
        int, typer.Option("--code-characters", min=80, help="Longest code in a question.")
    ] = 800,
    answer: Annotated[
        int, typer.Option("--answer-characters", min=20, help="Longest docstring in an answer.")
    ] = 400,
    category: Annotated[
        list[str] | None, typer.Option(help="Ask this kind only; repeatable. Default: all seven.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
) -> None:
    """Write questions about a source tree, with answers read off it, as training data."""
    from vkjit_models.common.source_chat import SourceOptions  # noqa: PLC0415  slow import
    from vkjit_models.dataset import categories_of, write_dataset  # noqa: PLC0415  slow import

    chosen = categories_of(category)
    options = SourceOptions(seed, files, functions, code, answer, chosen)
    write_dataset(source, output, options, Console(), overwrite=overwrite)


@app.command()
@_clear_errors
def sample(
    prompt: Annotated[str, typer.Argument(help="The question.")],
    model: Annotated[str, typer.Option(help='GGUF file, or "smollm2".')] = "smollm2",
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of an adapter in PEFT's layout.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 64,
) -> None:
    """Print the most likely reply to a question."""
    from vkjit_models.lora_sft.sample import greedy_reply  # noqa: PLC0415  slow import

    Console().print(greedy_reply(prompt, model, adapter, tokens), markup=False, highlight=False)


@app.command()
@_clear_errors
def merge(  # noqa: PLR0913  the options of the command
    base: Annotated[str, typer.Argument(help='GGUF file, or "smollm2".')],
    adapter: Annotated[Path, typer.Argument(help="Folder in PEFT's layout, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new GGUF file.")],
    kind: Annotated[
        str, typer.Option("--type", help='Type of merged tensors, or "keep" for their own.')
    ] = "f16",
    text: Annotated[
        Path | None, typer.Option(help="Text to compare on; a built-in one by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the adapter apart.")
    ] = True,
) -> None:
    """Merge an adapter into its base model and say what that cost."""
    from vkjit_models.lora_sft.merge_command import merge as run  # noqa: PLC0415  slow import

    run(Console(), base, adapter, output, kind, text=text, check=check)


@app.command()
@_clear_errors
def export(
    adapter: Annotated[Path, typer.Argument(help="Folder in PEFT's layout, or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder (peft) or file (gguf).")],
    kind: Annotated[AdapterFormat, typer.Option("--format", help="The format to write.")],
    model: Annotated[
        str | None, typer.Option(help="Base model, where the adapter does not name it.")
    ] = None,
) -> None:
    """Write an adapter in another format."""
    from vkjit_models.lora_sft.merge_command import export as run  # noqa: PLC0415  slow import

    run(Console(), adapter, output, kind.value, model)


@app.command()
@_clear_errors
def info(
    brief: Annotated[bool, typer.Option("--brief", help="List the devices only.")] = False,
) -> None:
    """Say which devices there are, what is used of them, and why others are missing."""
    Console(soft_wrap=True).print(vj.info(brief=brief), markup=False, highlight=False)


@app.command(
    add_help_option=False,  # the doctor's own parser answers --help, also without typer
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@_clear_errors
def doctor(context: typer.Context) -> None:
    """Check a device against the host, stage by stage; `vkjit doctor --help` lists the options."""
    from vkjit.doctor import main as check  # noqa: PLC0415  imports every layer of the library

    code = check(context.args)
    if code:
        raise typer.Exit(code)


@app.command()
@_clear_errors
def tune(  # noqa: PLR0913  the flags of the command
    program: Annotated[
        Path | None,
        typer.Argument(help="Text of a program, as jit(f).lower(x).as_text() gives it."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="A product, as 4096x4096x4096:f16 or 512x1536x576:f32:nt; repeatable."),
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help='The products of a LoRA step of a model: "smollm2".')
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of that step.")] = 512,
    device: Annotated[
        str | None, typer.Option(help="Default: the first real GPU, else cpu.")
    ] = None,
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds in all.")] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what has a result.")] = False,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="Write all results to this file, at the end.")
    ] = None,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="Add the results of such a file first.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print all results, at the end.")] = False,
) -> None:
    """Measure which kernels serve products best on a GPU, check them, and keep the results."""
    from vkjit_models import tune as tuning  # noqa: PLC0415  the models are a slow import

    console = Console(soft_wrap=True)
    if import_from is not None:
        console.print(f"{vj.tuning.load(import_from)} results added", highlight=False)
    jobs: list[tuning.Job] = [tuning.product(text) for text in shapes or ()]
    if lora is not None:
        jobs.append(tuning.lora_step(lora, tokens))
    if program is not None:
        jobs.append(tuning.program(program))
    if not (jobs or show or export_to or import_from):
        raise ArgumentError("tune: nothing to do; pass a program, --shapes, --lora or --list")
    tuning.run(jobs, console, device, budget, again=again)
    if show:
        tuning.show(console)
    if export_to is not None:
        count = tuning.export(export_to)
        console.print(f"{count} results in {export_to}", markup=False, highlight=False)


def main() -> None:
    """Entry point of ``python -m vkjit_models.cli``."""
    app()


if __name__ == "__main__":
    sys.exit(main())
