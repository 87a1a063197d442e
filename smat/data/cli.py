"""The commands about data: prepare turns books into token shards, check compares their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Turn PG-19 into memory-mapped tokens.", no_args_is_help=True)


@app.command(
    epilog="Examples:\n\n  smat data prepare deepmind-gutenberg --out pg19\n\n"
    "  smat data prepare pg19-arrow --out pg19 --tokens gpt2 --vocab encoder.json "
    "--merges vocab.bpe\n\n  smat data prepare books --out pg19 --tokens bytes --tokens bpe4096"
)
def prepare(
    source: Annotated[
        Path,
        typer.Argument(
            help="PG-19: the official folder of text files, a Hugging Face dataset on disk, or "
            "MANIFEST.csv with offsets into books/SPLIT.txt.xz."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, which runs take as --data.")],
    tokens: Annotated[
        list[str] | None,
        typer.Option(help="bytes, gpt2, or bpeN: N tokens trained on the books; repeat (bytes)."),
    ] = None,
    vocab: Annotated[Path | None, typer.Option(help="GPT-2's encoder.json.")] = None,
    merges: Annotated[Path | None, typer.Option(help="GPT-2's vocab.bpe.")] = None,
) -> None:
    """Write token shards and a manifest of their hashes."""
    from smat.data.books import NUM_OFFICIAL, read_books
    from smat.data.shards import DATA_VARIABLE, prepare_tokens
    from smat.data.tokens import make_encoder

    for name in tokens or ["bytes"]:
        files = (vocab, merges) if name == "gpt2" else (None, None)
        encoder = make_encoder(name, lambda: (b.text for b in read_books(source, "train")), *files)
        manifest = prepare_tokens(source, out, encoder)
        for split, found in manifest["splits"].items():
            typer.echo(
                f"{name}, {split}: {found['books']:,} of PG-19's {NUM_OFFICIAL[split]:,} books, "
                f"{found['bytes']:,} bytes, {found['tokens']:,} tokens"
            )
    typer.echo(f"Run with --data {out}, or {DATA_VARIABLE}={out}")


@app.command(epilog="Example:\n\n  smat data check pg19")
def check(
    folder: Annotated[Path, typer.Argument(help="A folder that `smat data prepare` wrote.")],
) -> None:
    """Compare every file with its hash."""
    from smat.data.shards import check_hashes

    prepared = sorted(path.parent for path in folder.glob("*/manifest.json"))
    if not prepared:
        raise ValueError(f"{folder} has no prepared tokens; smat data prepare makes them")
    for path in prepared:
        typer.echo(f"{path}: {check_hashes(path)} files are as the manifest says")
