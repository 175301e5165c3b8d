"""An inspection as tables on a terminal, and as plots."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reluformer.console import print_table
from reluformer.errors import UserError
from reluformer.files import atomic_path

if TYPE_CHECKING:
    from reluformer.inspection.measure import Inspection, MemoryMeasures


def print_inspection(result: "Inspection") -> None:
    """Print variance ratios, attention statistics per head, and memories."""
    at = _nearest(result.percents, 0.2)
    top = f"top {result.percents[at]:g} %"
    print(
        f"{result.examples:,} examples, {result.source_tokens:,} source and "
        f"{result.target_tokens:,} target tokens"
    )
    print_table(
        "Variance over features, mean over tokens",
        ["layer", "branch", "residual", "ratio"],
        [
            [b.name, f"{b.branch:.4g}", f"{b.residual:.4g}", f"{b.ratio:.4g}"]
            for b in result.branches
        ],
    )
    print_table(
        "Attention, mean over query rows",
        ["layer.head", "sum", "entropy", "zeros", "dead rows", "dead keys", "cosine", top],
        [
            [
                f"{a.site} {a.layer}.{number}",
                f"{h.row_sum:.3f}",
                f"{h.entropy:.3f}",
                f"{h.zeros:.1%}",
                f"{h.dead_rows:.1%}",
                f"{h.dead_slots:.1%}",
                f"{h.anisotropy:.3f}",
                f"{a.top_share[at]:.1%}" if number == 0 else "",
            ]
            for a in result.attentions
            for number, h in enumerate(a.heads)
        ],
    )
    print_table(
        "Memories, mean over tokens",
        ["memory", "zeros", "dead slots", "entropy", "cosine", "variance", top],
        [
            [
                _memory_name(m),
                f"{m.zeros:.1%}",
                f"{m.dead_slots:.1%}",
                f"{m.entropy:.3f}",
                f"{m.anisotropy:.3f}",
                f"{m.output_variance:.4g}",
                f"{m.top_share[at]:.1%}",
            ]
            for m in result.memories
        ],
    )
    print("sum: of a row's weights; zeros: share of the visible keys or slots")
    print("cosine: mean pairwise cosine of the values (anisotropy)")
    print(f"{top}: share of the weight on the largest {result.percents[at]:g} % of keys or slots")


def plot_inspection(result: "Inspection", folder: Path) -> list[Path]:
    """Write variance ratios, top-p % curves and head statistics as SVG files into `folder`."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "reluformer"}):
        for name, draw in (
            ("variance-ratio", _draw_variance),
            ("top-share", _draw_top_share),
            ("heads", _draw_heads),
        ):
            figure = draw(pyplot, result)
            path = folder / f"{name}.svg"
            with atomic_path(path) as partial:
                figure.savefig(partial, format="svg", metadata={"Date": None})
            pyplot.close(figure)
            written.append(path)
    return written


def _draw_variance(pyplot: Any, result: "Inspection") -> Any:
    figure, axis = pyplot.subplots(figsize=(6.5, 0.22 * len(result.branches) + 1.2))
    names = [branch.name for branch in result.branches][::-1]
    axis.barh(names, [branch.ratio for branch in result.branches][::-1], color="#1d4e89")
    axis.set_xscale("log")
    axis.set_xlabel("variance of the branch / variance of the residual stream")
    figure.tight_layout()
    return figure


def _draw_top_share(pyplot: Any, result: "Inspection") -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(8.5, 3.4), sharey=True)
    for attention in result.attentions:
        axes[0].plot(result.percents, attention.top_share, linewidth=1,
                     label=f"{attention.site} {attention.layer}")  # fmt: skip
    for memory in result.memories:
        axes[1].plot(result.percents, memory.top_share, linewidth=1, label=_memory_name(memory))
    for axis, title, items in zip(axes, ("attentions", "memories"), ("keys", "slots"), strict=True):
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(f"top p % of the {items}")
        axis.legend(fontsize=6)
    axes[0].set_ylabel("share of the weight")
    figure.tight_layout()
    return figure


def _draw_heads(pyplot: Any, result: "Inspection") -> Any:
    fields = ("entropy", "zeros", "row_sum", "dead_rows")
    figure, axes = pyplot.subplots(
        1, len(fields), figsize=(10, 0.22 * len(result.attentions) + 1.6)
    )
    labels = [f"{a.site} {a.layer}" for a in result.attentions]
    for axis, name in zip(axes, fields, strict=True):
        rows = [[getattr(head, name) for head in a.heads] for a in result.attentions]
        limits = {"vmin": 0, "vmax": 1} if name in ("zeros", "dead_rows") else {}
        picture = axis.imshow(rows, aspect="auto", cmap="viridis", **limits)
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set_xlabel("head")
        axis.set_yticks(range(len(labels)), labels if axis is axes[0] else [""] * len(labels))
        figure.colorbar(picture, ax=axis, fraction=0.06)
    figure.tight_layout()
    return figure


def _memory_name(memory: "MemoryMeasures") -> str:
    return memory.name.removesuffix(".memory.memory")


def _nearest(percents: tuple[float, ...], percent: float) -> int:
    return min(range(len(percents)), key=lambda at: abs(percents[at] - percent))


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed; install the extra reluformer[plots]"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
