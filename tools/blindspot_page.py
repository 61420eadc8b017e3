"""The sections of the blind-spot report: figures and tables made from the records of tools.blindspot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from pretrain.evaluation.depth_task import ACCURACY, SOLVED, SOLVED_DEPTH
from tools.depth_grid import depths_of, draw_heat_map
from tools.report import Section, Table, axes_of, line_figure, new_figure

Record = dict[str, Any]


def sections(records: list[Record]) -> Iterator[Section]:
    """The page, one section for each question."""
    for make in (
        _models, _norms, _updates, _frontier, _depth, _radial, _supervision, _scale, _linear, _interventions, _training,
        _generation,
    ):  # fmt: skip
        yield make(records)


def _lines(records: list[Record], get: Callable[[Record], list[float]]) -> dict[str, tuple[range, list[float]]]:
    """One line for each model that has values, over loops or indices from 1 on."""
    lines = {}
    for record in records:
        if values := get(record):
            lines[record["name"]] = (range(1, len(values) + 1), values)
    return lines


def _notes(records: list[Record], section: str) -> list[str]:
    return [f"{r['name']}: {r['skipped'][section]}." for r in records if section in r["skipped"]]


def _models(records: list[Record]) -> Section:
    columns = ["model", "family", "readout", "objective", "norm penalty", "inter-loop norm", "parameters", "step",
               "trained loops", "computed in", "rows", "tokens of a row"]  # fmt: skip
    rows = [
        [
            r["name"], r["family"], r["readout"], r["objective"], r["norm_penalty"], str(r["interloop_norm"]).lower(),
            r["parameters"], r["step"], r["trained_loops"], f"{r['compute_dtype']} on {r['device']}",
            r["rows"], r["row_tokens"],
        ]
        for r in records
    ]  # fmt: skip
    return Section(
        "Models", "What was loaded, how it was trained, and the rows that it was measured on.",
        tables=[Table(columns, rows)], notes=_notes(records, "documents"),
    )  # fmt: skip


def _norms(records: list[Record]) -> Section:
    figure = new_figure()
    axes = axes_of(figure, xlabel="loop", ylabel="||h|| over tokens", yscale="log")
    for i, record in enumerate(records):
        loops = range(1, len(record["norms"]) + 1)
        axes.plot(loops, [n["mean"] for n in record["norms"]], color=f"C{i % 10}", marker="o", label=record["name"])
        tail = [n["p999"] for n in record["norms"]]
        axes.plot(loops, tail, color=f"C{i % 10}", linestyle=":", label="99.9% quantile" if i == 0 else None)
    axes.legend(fontsize=8)
    columns = ["model", "loop", "mean", "RMS of entries", "50%", "90%", "99%", "99.9%", "max"]
    rows = [[r["name"], t, *n.values()] for r in records for t, n in enumerate(r["norms"], 1)]
    return Section(
        "Norm of the state by loop",
        "The length of each token's state after each loop, its mean and its tail. A norm that grows from loop to loop "
        "while the loss stands still is the blind spot: later loops change the direction, and with it the prediction, "
        "less and less.",
        {"norms": figure}, [Table(columns, rows)],
    )  # fmt: skip


def _updates(records: list[Record]) -> Section:
    names = {
        "angle": "angle, rad",
        "relative_residual": "||h' - h|| / ||h||",
        "radial_velocity": "<u, h' - h>",
    }
    figure = new_figure(10, 3.6)
    panels = figure.subplots(1, 3)
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        axes.set(xlabel="from loop t to t + 1", ylabel=label)
        axes.grid(True, color="0.92")
        for i, record in enumerate(records):
            values = record["updates"].get(key, [])
            axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, color=f"C{i % 10}",
                      label=record["name"])  # fmt: skip
    panels[0].legend(fontsize=7)
    columns = ["model", "from loop", "angle, rad", "||h' - h||", "relative residual", "radial velocity"]
    rows = []
    for r in records:
        u = r["updates"]
        for t in range(len(u.get("angle", []))):
            values = [u[k][t] for k in ("angle", "step_norm", "relative_residual", "radial_velocity")]
            rows.append([r["name"], t + 1, *values])
    return Section(
        "Change from loop to loop",
        "Means over tokens: the angle between successive states, the length of the update relative to the state, and "
        "how much of it points outwards.",
        {"updates": figure}, [Table(columns, rows)], _notes(records, "updates"),
    )  # fmt: skip


def _frontier(records: list[Record]) -> Section:
    by_loops = line_figure(_lines(records, lambda r: r["ppl"]), xlabel="K, loops", ylabel="perplexity")
    figure = new_figure()
    axes = axes_of(figure, xlabel="tokens/s of a K-loop pass", ylabel="perplexity", xscale="log")
    for i, record in enumerate(records):
        axes.plot(record["tokens_per_sec"], record["ppl"], marker="o", color=f"C{i % 10}", label=record["name"])
        for k, (x, y) in enumerate(zip(record["tokens_per_sec"], record["ppl"], strict=True), 1):
            axes.annotate(str(k), (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.legend(fontsize=8)
    counts = range(1, max(len(r["ppl"]) for r in records) + 1)
    rows = [[r["name"], *_padded(r["ppl"], len(counts))] for r in records]
    gaps = [[r["name"], *_padded([r["ppl"][0] - p for p in r["ppl"]], len(counts))] for r in records]
    speeds = [[r["name"], *_padded(r["tokens_per_sec"], len(counts))] for r in records]
    columns = ["model", *(f"K = {k}" for k in counts)]
    deviation = max(r["one_pass_deviation"] for r in records)
    return Section(
        "Do more loops help? Quality against compute",
        "Perplexity at each number of loops, all from one pass of the core; and the same against tokens per second, "
        f"timed in separate passes of K loops, whose losses agree with the one pass to {deviation:.1e}. A gap near 0 "
        "means that the model does not use its loops.",
        {"ppl_by_loops": by_loops, "frontier": figure},
        [
            Table(columns, rows, "perplexity"), Table(columns, gaps, "K-invariance gap: perplexity at 1 minus at K"),
            Table(columns, speeds, "tokens/s"),
        ],
    )  # fmt: skip


def _depth(records: list[Record]) -> Section:
    """Nothing but a sentence where no depth task was asked for."""
    by_model = {
        f"{r['name']}, {task}": {int(t): metrics for t, metrics in by_loops.items()}
        for r in records for task, by_loops in r["depth"].items()
    }  # fmt: skip
    title = "How deep are the problems that are solved?"
    if not by_model:
        return Section(title, "No depth task was asked for (--tasks depth:NAME).")
    lines = {
        name: (list(by_loops), [metrics[SOLVED_DEPTH] for metrics in by_loops.values()])
        for name, by_loops in by_model.items()
    }
    figures = {"solved_depth": line_figure(lines, xlabel="K, loops", ylabel="depth that is solved")}
    tables = []
    for i, (name, by_loops) in enumerate(by_model.items()):
        figures[f"depth_{i}"] = new_figure()
        draw_heat_map(figures[f"depth_{i}"].add_subplot(), by_loops, name)
        rows = [[depth, *(m[ACCURACY.format(depth)] for m in by_loops.values())] for depth in depths_of(by_loops)]
        tables.append(Table(["depth", *(f"K = {t}" for t in by_loops)], rows, f"accuracy, {name}"))
    return Section(
        title,
        "Problems whose answer takes a known number of dependent steps, their depth. A depth is solved where it and "
        f"all smaller ones measured have an accuracy of at least {SOLVED}. A curve that rises with K says that loops "
        "are steps; one that is flat beyond the trained number says that more of them add nothing.",
        figures, tables, _notes(records, "depth"),
    )  # fmt: skip


def _padded(values: list[float], count: int) -> list[float | None]:
    return [*values, *[None] * (count - len(values))]


def _radial(records: list[Record]) -> Section:
    lines = _lines(records, lambda r: [g["fraction"] for g in r["gradients"]])
    figure = line_figure(lines, xlabel="loop whose readout it is", ylabel="|<g, h>| / (||g|| ||h||)", yscale="log")
    columns = ["model", "readout", "loop", "fraction", "signed mean"]
    rows = [
        [r["name"], r["readout"], t, g["fraction"], g["signed"]]
        for r in records
        for t, g in enumerate(r["gradients"], 1)
    ]
    return Section(
        "Does the loss see the radius?",
        "Radial fraction of the gradient of each loop's own loss through its own readout, in fp64. A readout that "
        "normalises the state sees nothing of its length but what eps leaves (1e-12 .. 1e-6); a raw one sees 1e-2 and "
        "more. A coda between state and norm makes the readout only partly blind.",
        {"radial_fraction": figure}, [Table(columns, rows)],
    )  # fmt: skip


def _supervision(records: list[Record]) -> Section:
    figure = line_figure(
        _lines(records, lambda r: r["singular_values"]), xlabel="index", ylabel="singular value", yscale="log"
    )
    columns = ["model", "loop", "radial share", "share of the bottom directions", "k", "coordinates below 1e-2"]
    rows = [
        [r["name"], t, g["radial_share"], g["subspace_share"], r["subspace"], g["weak_coordinates_share"]]
        for r in records for t, g in enumerate(r["gradients"], 1)
    ]  # fmt: skip
    spectrum = [
        [r["name"], len(s := r["singular_values"]), s[0], s[-1], s[0] / s[-1] if s[-1] else None] for r in records
    ]
    return Section(
        "Supervision by direction",
        "Shares of the squared gradient along the state and in the span of the k directions that the readout reads "
        "least, and the singular values of the readout (head x norm weight x output projection, without the coda). "
        "The smallest is not 0: no direction of the state is invisible. The share of weakly supervised coordinates "
        "depends on the basis and is given because some texts use it.",
        {"singular_values": figure},
        [
            Table(["model", "directions", "largest", "smallest", "condition"], spectrum, "singular spectrum"),
            Table(columns, rows, "gradient by direction"),
        ],
    )  # fmt: skip


def _scale(records: list[Record]) -> Section:
    figure = new_figure()
    axes = axes_of(figure, xlabel="factor on the state", ylabel="cross entropy, nats", xscale="log")
    for i, r in enumerate(records):
        axes.plot([float(a) for a in r["scale"]], r["scale"].values(), marker="o", color=f"C{i % 10}", label=r["name"])
    axes.legend(fontsize=8)
    table = Table(
        ["model", *(f"x {a}" for a in records[0]["scale"])], [[r["name"], *r["scale"].values()] for r in records],
        "cross entropy after the trained number of loops, with the state that is read out multiplied",
    )  # fmt: skip
    tables, figures = [table], {"scale": figure}
    edited = [r for r in records if r["edits"]]
    if edited:
        rows = [
            [r["name"], what, *(e - x for e, x in zip(r["edits"][key], r["loss"], strict=True))]
            for r in edited for key, what in (("clamp", "clamp"), ("remove_radial", "no radial updates"))
        ]  # fmt: skip
        count = max(len(row) for row in rows) - 2
        rows = [[*row, *[None] * (count + 2 - len(row))] for row in rows]
        columns = ["model", "edit", *(f"K = {k}" for k in range(1, count + 1))]
        tables.append(Table(columns, rows, "change of the cross entropy in nats"))
    return Section(
        "Does the prediction need the scale?",
        "Cross entropy where the state is multiplied before its readout; where each token keeps its length of loop 1 "
        "(clamp); and where updates lose their radial part. Changes near 0 say that the growing norm carries nothing "
        "that the model uses.",
        figures, tables, _notes(records, "edits"),
    )  # fmt: skip


def _linear(records: list[Record]) -> Section:
    columns = ["model", "spectral radius", "||Bbar||", "||C||", "||C h|| / ||h||, last loop"]
    rows = [[r["name"], *r["linear"].values(), r["gradients"][-1]["expansion"]] for r in records]
    return Section(
        "Linear parts",
        "Spectral radius of the linear part of the injection, spectral norms of what drives and of what projects the "
        "state. A radius below 1 bounds the linear surrogate only; for the whole loop it is neither necessary nor "
        "sufficient. A dash: the family has no such part.",
        tables=[Table(columns, rows)],
    )


def _interventions(records: list[Record]) -> Section:
    rows = [
        [r["name"], i["subspace"], i["edit"], i["loss_change"], i["logit_change"]]
        for r in records for i in r["interventions"]
    ]  # fmt: skip
    shares = [[r["name"], name, share] for r in records for name, share in r["variance_over_loops"].items()]
    tables = [Table(["model", "subspace", "share of the variance over loops"], shares)]
    if rows:
        tables.insert(0, Table(["model", "subspace", "edit", "cross entropy, change", "logits, relative change"], rows))
    return Section(
        "Interventions with controls",
        "After every loop a subspace of the state is emptied, or noise of 1% of the state's length is added within it: "
        "the radial direction, the directions that the readout reads least, and as a control those that it reads most.",
        tables=tables, notes=_notes(records, "interventions"),
    )  # fmt: skip


def _training(records: list[Record]) -> Section:
    trained = [r for r in records if r["training"]]
    figures: dict[str, Figure] = {}
    tables = []
    if trained:
        lines = {r["name"]: (r["training"]["steps"], r["training"]["oscillation"]) for r in trained}
        figures["oscillation"] = line_figure(lines, xlabel="step", ylabel="std of log gradient norm")
        for line in figures["oscillation"].axes[0].lines:
            line.set_marker("")
        rows = [
            [r["name"], r["training"]["oscillation"][-1], max(filter(None, r["training"]["grad_norms"]), default=None),
             len(r["training"]["spikes"]), ", ".join(map(str, r["training"]["spikes"][:8]))]
            for r in trained
        ]  # fmt: skip
        columns = ["model", "oscillation, last 100 steps", "largest gradient norm", "loss spikes", "first eight at"]
        tables.append(Table(columns, rows))
        figures |= _probed_norms(trained)
        parts = [[r["name"], *item] for r in trained for item in r["training"]["grad_norm_parts"].items()]
        if parts:
            tables.append(Table(["model", "part", "gradient norm"], parts, "raw gradient before the last probe"))
    return Section(
        "Training stability",
        "From the run's metrics: the gradient oscillation, the standard deviation of the logarithm of the gradient "
        "norm over the last 100 steps; loss spikes, losses above the running median by three interquartile ranges; and "
        "what the probe saw of the state's norm and of the gradient of each layer.",
        figures, tables, _notes(records, "training"),
    )  # fmt: skip


def _probed_norms(records: list[Record]) -> dict[str, Figure]:
    """Norm after the first and the last loop by step, from the probes of each run; nothing without probes."""
    lines = {}
    for r in records:
        if rows := r["training"]["norms"]:
            steps, loops = [row["step"] for row in rows], [key for key in rows[-1] if key != "step"]
            for loop in dict.fromkeys((loops[0], loops[-1])):
                lines[f"{r['name']}, loop {loop}"] = (steps, [row.get(loop) for row in rows])
    if not lines:
        return {}
    return {"norms_in_training": line_figure(lines, xlabel="step", ylabel="mean norm of the state", yscale="log")}


def _generation(records: list[Record]) -> Section:
    lines = {
        r["name"]: ([g["loops"] for g in r["generation"]], [g["repetition"] for g in r["generation"]])
        for r in records if r["generation"]
    }  # fmt: skip
    rows = [[r["name"], *g.values()] for r in records for g in r["generation"]]
    if not rows:
        return Section("Generation", "No text was generated.", notes=_notes(records, "generation"))
    figure = line_figure(lines, xlabel="K, loops", ylabel="share of repeated 4-grams")
    columns = ["model", "K", "repeated 4-grams", "loss, second half - first", "norm, second half / first"]
    return Section(
        "Generation",
        "Text sampled at temperature 1 with K loops: the share of 4-grams that came before in it, and how the model's "
        "own loss and the length of its state drift from the first to the second half.",
        {"repetition": figure}, [Table(columns, rows)], _notes(records, "generation"),
    )  # fmt: skip
