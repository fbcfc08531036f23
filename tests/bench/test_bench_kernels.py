"""The benchmark's inputs have the live share they claim, its reference is right, and it survives a
peer that fails."""

import argparse
import csv
import gc
import importlib
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paw_kernels import _rows, token_loss
from paw_kernels._head import Head

ROOT = Path(__file__).parents[2]
NAMES = ("compare", "cases", "measure", "must", "plot", "problem", "peers", "roofline")
compare, cases, measure, must, plot, problem, peers, roofline = (
    importlib.import_module(f"bench.kernels.{name}") for name in NAMES
)

CPU = torch.device("cpu")
WITHOUT_A_COMPILER = [
    p for p in peers.PEERS if p.why_not(CPU) is None and p.name != "torch_compile"
]


def made(T=96, D=128, V=150, *, live=0.4, known=False, dtype=torch.float32):
    return problem.make_problem(T, D, V, live=live, known=known, dtype=dtype, device=CPU)


@pytest.mark.parametrize(
    ("live", "dtype"), [(1.0, torch.float32), (0.4, torch.bfloat16), (0.0, torch.float32)]
)
def test_exactly_the_chosen_rows_turn_out_live(live, dtype):
    p = made(live=live, dtype=dtype)
    out = token_loss(p.hidden, p.weight, p.target, problem.paw_loss, p.rows)
    assert out.has_gradient.nonzero().squeeze(1).tolist() == p.live.tolist()
    assert p.live.numel() == round(96 * live)


def test_a_head_too_narrow_for_the_construction_is_refused():
    with pytest.raises(ValueError, match="D=4 is too small"):
        made(D=4)


def test_the_reference_is_float64_autograd():
    """Of sum_t a_t logp_t, on the rows that are compared."""
    p = made()
    slope = problem.slope_of_rows(p)
    h, w = (t.double().requires_grad_() for t in (p.hidden, p.weight))
    logp = (h @ w.t()).log_softmax(-1).gather(1, p.target[:, None]).squeeze(1)
    d_hidden, d_weight = torch.autograd.grad((slope * logp).sum(), (h, w))
    torch.testing.assert_close(p.logp, logp.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        problem.d_hidden(p, slope), d_hidden[p.checked], rtol=1e-9, atol=1e-15
    )
    torch.testing.assert_close(problem.d_weight(p, slope), d_weight[p.words], rtol=1e-9, atol=1e-15)


def test_a_wrong_gradient_does_not_pass():
    p = made()
    slope = problem.slope_of_rows(p)
    right = problem.Errors(logp=0.0, d_hidden=0.0, d_weight=0.0)
    assert problem.passes(right, p.plain)
    h = torch.zeros_like(p.hidden)
    w = torch.zeros_like(p.weight)
    h[p.checked] = problem.d_hidden(p, 1.01 * slope).float()
    w[p.words] = problem.d_weight(p, slope).float()
    found_errors = problem.errors(p, slope, loss=None, logp=None, gradients=[h, w])
    assert not problem.passes(found_errors, p.plain)
    assert found_errors.d_weight < 1e-6


OURS = [
    ("paw[auto]", live, dtype) for live in (1.0, 0.4) for dtype in (torch.float32, torch.bfloat16)
]
PEERS = [(peer.name, 0.4, torch.float32) for peer in WITHOUT_A_COMPILER]


@pytest.mark.parametrize(("name", "live", "dtype"), OURS + PEERS)
@pytest.mark.parametrize("dead", ["found", "known"])
def test_ours_and_the_peers_have_the_reference_s_value_and_gradients(name, live, dtype, dead):
    # More than one vocabulary block.
    p = made(V=9000, live=live, known=dead == "known", dtype=dtype)
    run = cases.implementation(
        cases.Case(cases.Group("tiny", 96, 128, 9000), live, dead, name, cases.BOTH), p
    )
    h = p.hidden.requires_grad_()
    w = p.weight.requires_grad_()
    loss, logp = run.both(h, w)
    loss_and_reference = None if run.expected is None else (loss.detach(), run.expected)
    gradients = list(torch.autograd.grad(loss, (h, w)))
    errors = problem.errors(p, run.slope, loss=loss_and_reference, logp=logp, gradients=gradients)
    assert problem.passes(errors, p.plain)
    assert (errors.loss or 0) < (1e-6 if name == "paw[auto]" else 1e-4)
    if any(peer.name == name and peer.is_cross_entropy for peer in WITHOUT_A_COMPILER):
        torch.testing.assert_close(
            run.expected, -p.logp[p.live if dead == "known" else slice(None)].mean()
        )


def test_peak_memory_counts_what_operators_hold():
    x = torch.ones(1 << 18)

    def call(x):
        a = x + 1
        b = a * 2
        del a
        return (b + 1).sum()

    assert measure.peak_bytes(call, x) == pytest.approx(2 * x.nbytes, abs=4096)


@pytest.mark.slow
def test_a_failing_peer_is_a_row_and_a_resumed_run_measures_what_is_missing(
    monkeypatch, tmp_path, capsys
):
    def failing(hidden, weight, target):
        raise RuntimeError("no kernel image\nis available")

    def measured(**changed):
        options = {"quick": True, "seconds": 0.01, "only": ["tiny"], "resume": False} | changed
        compare.run(argparse.Namespace(**options, out=tmp_path / "k.csv"), CPU)
        return list(csv.DictReader((tmp_path / "k.csv").open(encoding="utf-8")))

    # Compiling is torch's own business, and takes seconds.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    gc.freeze()  # each case collects garbage, also among what earlier tests have imported
    naive = next(peer for peer in peers.PEERS if peer.name == "naive")
    monkeypatch.setattr(cases, "PEERS", [replace(naive, name="broken", loss=failing), naive])
    monkeypatch.setattr(
        compare, "groups", lambda device, quick: [cases.Group("tiny", 64, 128, 150)]
    )
    first = measured(only=["tiny", "naive"])
    rows = measured(resume=True)
    assert rows[: len(first)] == first
    broken = [row for row in rows if row["implementation"] == "broken"]
    others = [row for row in rows if row["implementation"] != "broken"]
    assert "naive" not in {row["implementation"] for row in rows[len(first) :]}
    assert {row["implementation"] for row in others} >= {"naive", "paw[torch]"}
    assert rows.index(broken[0]) < rows.index(others[-1])  # the run goes on
    assert {row["error"] for row in broken} == {"RuntimeError: no kernel image"}
    for row in others:
        assert not row["error"]
        assert row["torch"] == torch.__version__
        assert float(row["ms_low"]) <= float(row["ms"]) <= float(row["ms_high"])
        assert row["implementation"] == "matmul" or row["passes"] == "yes"
    assert "no kernel image" in capsys.readouterr().out
    (picture,) = plot.draw(tmp_path / "k.csv", tmp_path)
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_a_comparison_leaves_no_tensor_to_the_next(monkeypatch):
    weights = []

    def problem_of(case, dtype, device):
        assert all(weight() is None for weight in weights)
        p = made()
        weights.append(weakref.ref(p.weight.untyped_storage()))
        return p

    monkeypatch.setattr(compare, "problem_of", problem_of)
    group = cases.Group("small", 96, 128, 150)
    chosen = [
        cases.Case(group, live, "" if live == 1 else "found", name, cases.BOTH)
        for live in (1.0, 0.4)
        for name in ("paw[torch]", "naive")
    ]
    rows = []
    compare.run_group(
        group,
        chosen,
        SimpleNamespace(add=lambda row: None),
        lambda case, row: rows.append(row),
        dtype=torch.float32,
        device=CPU,
        seconds=0.01,
    )
    assert len(weights) == 2
    assert len(rows) == 4
    assert all(weight() is None for weight in weights)


@pytest.mark.parametrize("only", ["", "quack", "f 1"])
def test_plots_of_a_gpu_need_no_particular_case(only, tmp_path):
    roofline.write(tmp_path / "kernels_predicted.csv")
    rows = [
        row
        for row in plot.read(tmp_path / "kernels_predicted.csv")
        if only in f"{row['implementation']} f {row['live']}"
    ]
    with (tmp_path / "k.csv").open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0], "device", "cuda"])
        table.writeheader()
        table.writerows(
            {**row, "kind": "measured", "device": "test data", "cuda": "13.0"} for row in rows
        )
    assert len(plot.draw(tmp_path / "k.csv", tmp_path)) == 3


def test_the_model_matches_a_case_by_hand():
    machine = replace(roofline.BEST, tflops=500.0, triton_tflops=250.0, gb_s=2000.0, wait_us=10.0)
    T = 4096
    D = 1024
    V = 102_400
    live = 0.5
    gemm = 2 * T * D * V / 500e12
    epilogue = 97 * 1307 * 8 / (4 * 1.755e9)  # 32 x 400 tiles on 132 multiprocessors
    # 400 tiles of the vocabulary, 16 bytes of statistics each; e and dL/dz of half of the rows in
    # bf16.
    merge = T * 400 * 16 / 2000e9
    gradient = (T / 2) * (2 * V + 400 * 16 + 2 * V) / 2000e9
    # Live rows gathered, their gradients scattered (read and written); d_hidden zeroed first.
    copies = (2 * 4 * (T / 2) * D + 2 * T * D) / 2000e9
    waits = 2 * 10e-6  # live rows of the one chunk (and whether the inputs are good), factor
    matmuls = gemm * (2 + 2 * live)  # Triton's own takes twice as long as cuBLAS's would
    by_hand = 1e3 * (matmuls + epilogue + merge + gradient + copies + waits)
    assert roofline.total(roofline.paw(T, D, V, live), machine) == pytest.approx(by_hand, rel=1e-9)

    # `cuda`: cuBLAS's logits in float32, read for the statistics and again for the gradient.
    rows = (T * 4 * V + (T / 2) * (4 + 2) * V) / 2000e9
    cuda_by_hand = 1e3 * (gemm * (1 + 2 * live) + rows + copies + waits)
    cuda = roofline.total(roofline.paw_cuda(T, D, V, live), machine)
    assert cuda == pytest.approx(cuda_by_hand, rel=1e-9)

    # The host's floor.
    assert roofline.total(roofline.paw(T, D, V, live), replace(machine, launch_us=1e3)) == 160.0


@pytest.mark.parametrize("T", [100, 4096, 32_768, 131_072])
@pytest.mark.parametrize("backward", [True, False])
def test_the_model_cuts_the_chunks_of_the_triton_backend(T, backward, monkeypatch):
    pytest.importorskip("triton")
    backend = importlib.import_module("paw_kernels._triton")
    monkeypatch.setattr(backend, "tiles_for", lambda weight, softcap, n: backend.TILES["sm_90", 2])
    for D, V in problem.HEADS.values():
        weight = torch.empty(V, D, dtype=torch.bfloat16, device="meta")
        _, step = backend.make_rows(Head(weight, None, 1.0, None), T, backward)
        assert roofline.chunk_rows(T, D, V, backward=backward) == step


def test_the_model_cuts_the_chunks_of_the_cuda_backend(monkeypatch):
    monkeypatch.setattr(_rows, "chunk_bytes", lambda usual, device, most=0: most)
    monkeypatch.setitem(_rows.CHUNK_BYTES, "meta", 0)
    for T in (100, 4096, 32_768):
        for D, V in problem.HEADS.values():
            weight = torch.empty(V, D, dtype=torch.bfloat16, device="meta")
            _, step = _rows.make_rows(Head(weight, None, 1.0, None), T, True)
            assert roofline.cuda_chunk_rows(T, V) == step


def test_predictions_grow_with_the_live_share_and_never_beat_the_matmuls():
    for machine in (roofline.BEST, roofline.CAUTIOUS):
        times = [
            roofline.total(roofline.paw(*roofline.REFERENCE, share), machine)
            for share in (0, 0.1, 0.4, 1)
        ]
        bounds = [roofline.matmul_bound(*roofline.REFERENCE, share) for share in (0, 0.1, 0.4, 1)]
        assert times == sorted(times)
        assert all(time > bound for time, bound in zip(times, bounds, strict=True))
        peer_times = [
            roofline.total(roofline.peer(name, *roofline.REFERENCE), machine)
            for name in roofline.PEERS
        ]
        assert min(peer_times) > bounds[-1]
    for row in roofline.predictions():
        assert float(row["ms_cautious"]) >= float(row["ms"])
        parts = sum(float(row[f"{name}_ms"]) for name in roofline.TERMS)
        # Of one chunk.
        host = (roofline.LAUNCHES + roofline.CHUNK_LAUNCHES) * roofline.BEST.launch_us / 1e3
        assert max(parts, host) == pytest.approx(float(row["ms"]), abs=0.005)


def test_the_committed_predictions_are_those_of_the_model(tmp_path):
    roofline.write(tmp_path / "predicted.csv")
    assert (tmp_path / "predicted.csv").read_text() == roofline.PREDICTED.read_text()


def gpu_row(ms, live=1.0, dead="", name="paw[triton]", **changes):
    columns = {
        "head": must.HEAD,
        "T": str(roofline.REFERENCE[0]),
        "live": str(live),
        "dead": dead,
        "mode": must.BOTH,
    }
    return {
        **columns,
        "implementation": name,
        "ms": str(ms),
        "share": "0.95",
        "passes": "yes",
        **changes,
    }


def test_the_measured_column_reads_the_tables():
    gpu = [
        *(gpu_row(17.0), gpu_row(16.0, passes="no"), gpu_row(20.0, name="paw[cuda]")),
        *(gpu_row(10.2, 0.4, "found"), gpu_row(7.0, 0.4, "known")),
        *(gpu_row(17.5, 0.4, "found", "quack"), gpu_row(30.0, 0.4, "found", "naive")),
    ]
    measured = [row.measured(gpu, []) for row in must.table()[:4]]
    assert measured == pytest.approx([17.0, 10.2 / 17.0, 10.2 / 17.5, 0.95])
    assert "| 17.00: met |" in must.table()[0].line(gpu, [])
    assert "open" in must.table()[0].line([], [])


def test_the_page_has_the_table_of_today():
    page = must.DOCS.read_text(encoding="utf-8")
    assert must.updated(page) == page


def test_the_example_of_the_page_runs():
    page = must.DOCS.read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) <= 25
    exec(compile(example, str(must.DOCS), "exec"), {})  # noqa: S102
