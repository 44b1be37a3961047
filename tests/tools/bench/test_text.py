"""Benchmarks on real documents: packed by ours, padded by the baselines, the same documents and the same loss per
token.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks import hf_trainer
from llm_fp8.data.pack import pack
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.tools.bench.measure import measure, speed
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.workload import Workload, in_rows, random_batch
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from scripts import benchmark

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def step():
    return Workload.parse("embedded:2x256x2@embedded", 1)


def documents_of(batch):
    """The tokens of a batch's documents, told by what is real in it."""
    if batch.cu_seqlens is None:
        return [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    bounds = batch.cu_seqlens.tolist()
    segments = [batch.input_ids[0, start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    # What is left of a row is a segment in which nothing is predicted.
    return [
        s.tolist()
        for s, start in zip(segments, bounds, strict=False)
        if bool((batch.labels[0, start : start + len(s)] != IGNORE_INDEX).any())
    ]


def test_a_packed_batch_in_rows():
    packed = random_batch(Workload("Llama-3.2-1B", 2, 64, 1, 1), 1024, 0)
    batch = in_rows(packed, 2, num_real=32)
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (2, 64)
    assert batch.attention_mask.sum(dim=1).tolist() == [32, 32] and batch.cu_seqlens is None


def test_both_arms_have_the_same_documents_and_labels(step):
    packed, padded = step.packed_documents(), step.padded_documents()
    assert len(packed) == 2 and all(batch.input_ids.shape == (1, 512) for batch in packed)
    assert all(batch.input_ids.shape[1] == 256 and len(batch.input_ids) <= 2 for batch in padded)
    here, there = ([ids for batch in batches for ids in documents_of(batch)] for batches in (packed, padded))
    assert sorted(here) == sorted(there) and len(there) == len(step.documents) > 4
    counts, wider = step.step_tokens(padded=False), step.step_tokens(padded=True)
    assert counts.num_real_tokens == wider.num_real_tokens == sum(map(len, there))
    assert counts.num_supervised_tokens == wider.num_supervised_tokens == sum(len(ids) - 1 for ids in there)
    assert counts.num_tokens == 1024 and wider.num_tokens == 256 * len(there)
    facts = step.document_facts()
    assert facts["num_documents"] == len(there) and facts["mean_length"] == counts.num_real_tokens / len(there)


def test_as_many_documents_as_fit(step):
    """One more would need a fifth row."""
    number = len(step.documents)
    lengths = [len(document.input_ids) for document in step._read(2048)]
    assert lengths[:number] == [len(document.input_ids) for document in step.documents]
    assert len(pack(lengths[:number], 256)) == 4 and len(pack(lengths[: number + 1], 256)) == 5
    assert step.document_facts()["sha256"] != Workload.parse("embedded:2x256x1@embedded", 1).document_facts()["sha256"]


def test_a_rivals_labels_are_the_tokens_and_none_where_it_pads(step):
    work = Workload.parse("embedded:2x256x2@embedded", 1)
    for inputs, batch in zip(work.hf_inputs(1024), step.padded_documents(), strict=True):
        mask = inputs["attention_mask"]
        learnt = mask.clone()
        learnt[:, 0] = False  # which the model never looks at
        assert torch.equal(inputs["labels"][learnt], inputs["input_ids"][learnt])
        assert (inputs["labels"][~learnt] == IGNORE_INDEX).all() and torch.equal(inputs["input_ids"], batch.input_ids)


@pytest.mark.slow
def test_packed_and_padded_have_the_same_loss_per_token(tiny_architecture):
    """At equal weights and documents; what they gain by packing is real tokens, not a better loss."""
    work = Workload.parse(f"{tiny_architecture}:2x256x2@embedded", 3)
    ours, theirs = (measure(work, parse_variant(name), 1, CPU) for name in ("bf16:swap", "hf_bf16"))
    assert ours["documents"] == theirs["documents"]
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-4)
    assert ours["losses"][2] < ours["losses"][0] and theirs["losses"][2] < theirs["losses"][0]
    real = ours["step_tokens"]["num_real_tokens"]
    assert (
        theirs["step_tokens"]["num_real_tokens"]
        == real
        < ours["step_tokens"]["num_tokens"]
        < theirs["step_tokens"]["num_tokens"]
    )
    rows = []
    for name, found in (("hf_bf16", theirs), ("bf16:swap", ours)):
        answer = {"failed": None, **found, "step_times_s": [1.0, 2.0, 2.0]}
        rows.append(benchmark.summarise(work, parse_variant(name), [answer]))
    assert [row["real_tokens_per_s"] for row in rows] == [real / 2, real / 2] and rows[0]["tokens_per_s"] > rows[1][
        "tokens_per_s"
    ]
    assert (
        rows[0]["text"] == "embedded"
        and rows[0]["real_tokens_per_s_p90"] <= rows[0]["real_tokens_per_s_fastest"] == real
    )
    assert "1.00 x hf_bf16" in benchmark._line(rows[1], rows[0]), "held against it by real tokens"


def test_random_tokens_are_counted_as_ever():
    work = Workload.parse("Llama-3.2-1B:8x1024x4", 6)
    assert (
        "text" not in work.to_dict()
        and work.text_facts() == {}
        and not any(name.startswith("real") for name in speed(work, [1.0]))
    )
    assert work.step_tokens().num_tokens == work.tokens_per_step == 32768


def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--workloads embedded:1x64x1@none.jsonl: .*none.jsonl: no such file"):
        Workload.parse("embedded:1x64x1@none.jsonl", 1)
    (tmp_path / "short.jsonl").write_text('{"text": "one two three"}\n')
    with pytest.raises(
        UserError,
        match="short.jsonl holds .* tokens in 1 documents of at most 64, and a step of 1 rows of 64 takes more",
    ):
        Workload.parse(f"embedded:1x64x1@{tmp_path}/short.jsonl", 1).batches(1024)
    launch = LaunchRanks(world_size=2, local_world_size=2, launched=True)
    with pytest.raises(UserError, match="real documents are measured on one GPU alone"):
        parse_variant("ddp:bf16:swap").check(Workload.parse("embedded:1x64x1@embedded", 1), launch)
    monkeypatch.setattr(
        "sys.argv", ["hf_trainer.py", "--workload=embedded:1x64x1@embedded", f"--output={tmp_path}/r.json"]
    )
    with pytest.raises(UserError, match="rows of its own; drop @embedded"):
        hf_trainer.main()


def test_a_name_is_read_back():
    work = Workload.parse("embedded:1x64x2@embedded", 1)
    assert Workload.parse(work.name, 1) == work


def test_the_8_bit_optimizer_is_an_option_of_ours():
    work = Workload.parse("Llama-3.2-1B:1x16x1", 1)
    assert parse_variant("delayed:adamw_8bit").config(work).optim.optimizer == "adamw_8bit"
    assert parse_variant("delayed").config(work).optim.optimizer == "auto"
    launch = LaunchRanks(world_size=2, local_world_size=2, launched=True)
    with pytest.raises(UserError, match="8-bit blocks cannot be split"):
        parse_variant("fsdp_full:delayed:adamw_8bit").check(work, launch)
