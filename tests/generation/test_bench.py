"""The benchmark: same work first, then ratios. Oracle of every figure: arithmetic written out beside it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.live_model import LiveModel
from lora_merge.engines.prompts import Prompt
from lora_merge.generation.bench import api, figures, memory, worker
from lora_merge.generation.bench.arms import ARMS, ArmResult, Task, WriteList
from lora_merge.generation.bench.measure import Bench, make_write_list, median
from lora_merge.generation.bench.progress import ProgressFile, ProgressLines, tell_nobody
from lora_merge.generation.bench.proof import Limits, compare, first_difference, within_engines
from lora_merge.generation.bench.runner import Runner
from lora_merge.generation.bench.worker import kv_bytes_per_token, read_work, write_work
from lora_merge.generation.bench_cli import main
from lora_merge.generation.errors import GenerationError
from tests.engines.builders import make_tokenizer
from tests.generation.builders import make_prompts, write_lines
from tests.generation.fakes import FakeEngine

LABELS = DecisionLabels(Label("skip", 11), Label("write", 22))
LISTED = WriteList((0, 1, 2, 3), (0, 2), (2, 3, 4, 5))


def arm(**changes) -> ArmResult:
    """Five prompts, four of them written: 14 tokens of texts."""
    usual = ArmResult(
        seconds={"import": 1.0, "load": 2.0, "warm_up": 0.5, "decide": 4.0, "write": 6.0},
        work_seconds_of_repeats=[10.0],
        decisions=["write"] * 4 + ["skip"],
        skip_probabilities=[0.1, 0.45, 0.2, 0.55, 0.9],
        texts={0: (5, 1), 1: (5, 6, 1), 2: (5, 6, 7, 1), 3: (5, 6, 7, 8, 1)},
        prompt_tokens=100,
        written_tokens=19,
        computed={"prompt": 60, "shared": 20, "new": 14, "padding": 4, "waiting": 2},
        memory={"host_peak": 10**9, "device_peak": None},
        kv=None,
        quantile_seconds=(2.0, 4.0),
        kept_seconds={"all": 6.0, "kept": 2.5, "same": 1.0},
        engine={"kind": "transformers", "versions": {"torch": "2"}, "dtype": "bfloat16", "device": "cpu", "settings": {}},
    )
    return dataclasses.replace(usual, **changes)


FAST = arm(seconds={"import": 3.0, "load": 20.0, "warm_up": 0.5, "decide": 2.0, "write": 3.0}, quantile_seconds=(1.0, 1.0))


# The same work


def test_equal_arms_did_the_same_work():
    proof = compare(arm(), FAST, LISTED, Limits())
    assert proof.holds
    assert (proof.agreement, proof.disagreements, proof.tokens, proof.token_difference) == (1.0, 0, 14, 0.0)
    assert (proof.compared, proof.differing, proof.first_difference) == (4, 0.0, None)


def test_what_differs_is_counted():
    """Prompt 3 is decided otherwise (a near tie) and not written; text 1 differs from its second token on, text 2 is cut."""
    other = arm(
        decisions=["write"] * 3 + ["skip", "skip"],
        texts={0: (5, 1), 1: (5, 9, 1), 2: (5, 6, 7)},
    )
    proof = compare(arm(), other, LISTED, Limits(min_agreement=0.75, max_token_difference=0.5))
    assert (proof.agreement, proof.disagreements, proof.near_ties) == (0.8, 1, 1)
    assert proof.tokens == 8
    assert proof.token_difference == pytest.approx(6 / 14)
    assert (proof.compared, proof.differing) == (3, pytest.approx(2 / 3))
    assert proof.first_difference == 2  # the median of 1 and 3
    assert proof.holds
    strict = compare(arm(), other, LISTED, Limits())
    assert [reason.split()[0] for reason in strict.reasons] == ["decisions", "tokens"]


def test_an_arm_that_decided_fewer_prompts_did_other_work():
    proof = compare(arm(), arm(decisions=["write"] * 4 + ["skip", "skip"]), LISTED, Limits())
    assert "did not decide the same prompts" in proof.reasons[0]


@pytest.mark.parametrize(
    ("one", "other", "place"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (1,), 0)]
)
def test_where_two_texts_part(one, other, place):
    assert first_difference(one, other) == place


# Figures


def test_ratios_are_slow_over_fast():
    arms = {"hf-two-phase": arm(), "vllm-two-phase": FAST}
    assert figures.ratios(arms, "hf-two-phase", "vllm-two-phase") == {"total": 2.0, "decide": 2.0, "write": 2.0}
    one_shot = arm(seconds={"load": 1.0, "one_shot": 15.0})
    assert figures.ratios({"a": one_shot, "b": FAST}, "a", "b") == {"total": 3.0}


def test_no_ratio_without_the_same_work():
    proof = {"vllm-two-phase": compare(arm(), arm(texts={0: (5,)}), LISTED, Limits())}
    assert not figures.comparable("hf-two-phase", "vllm-two-phase", proof)
    assert figures.comparable("hf-two-phase", "hf-one-shot", proof)


def test_break_even_counts_loading():
    """Per prompt 10/5 = 2 s against 5/5 = 1 s; starting takes 3.5 s against 23.5 s: from 20 prompts on."""
    assert figures.break_even(arm(), FAST, 5) == 20
    assert figures.break_even(FAST, arm(), 5) is None  # slower and first to start: never wins in the long run
    quick_start = arm(seconds={"import": 0.0, "load": 1.0, "warm_up": 0.0, "decide": 1.0, "write": 1.0})
    assert figures.break_even(arm(), quick_start, 5) == 0


def test_groups_by_length_are_of_equal_size_and_ordered():
    listed = WriteList((3, 4, 7, 9, 10), None, (30, 10, 20, 50, 40))
    assert listed.quantiles(2) == [[4, 7], [3, 10, 9]]
    groups = figures.by_length(arm(), FAST, LISTED)
    assert [(group["shortest"], group["longest"], group["ratio"]) for group in groups] == [(2, 3, 2.0), (4, 5, 4.0)]
    assert figures.by_length(arm(quantile_seconds=()), FAST, LISTED) == []


def test_the_knee_is_the_smallest_batch_that_is_good_enough():
    sizes = [{"batch": 32, "seconds": 20.0}, {"batch": 64, "seconds": 10.4}, {"batch": 128, "seconds": 10.0}]
    assert figures.knee([*sizes, {"batch": 256, "failed": "out of memory"}]) == 64
    assert figures.knee([{"batch": 256, "failed": "out of memory"}]) is None


def test_the_best_of_a_sweep():
    sizes = [{"batch": 32, "seconds": 20.0}, {"batch": 64, "seconds": 10.4}, {"batch": 128, "failed": "out of memory"}]
    assert figures.best(sizes)["batch"] == 64
    assert figures.best(sizes[2:]) is figures.best([]) is None


def test_one_shot_is_held_against_two_phases_of_its_own_engine():
    """vLLM's two arms agree with each other where both differ from Transformers."""
    other = arm(texts={**arm().texts, 1: (5, 9, 1)})
    arms = {"hf-two-phase": arm(), "hf-one-shot": other, "vllm-two-phase": other, "vllm-one-shot": other}
    within = within_engines(arms, LISTED, Limits())
    assert {name: proof.differing for name, proof in within.items()} == {"hf-one-shot": 0.25, "vllm-one-shot": 0.0}
    assert within_engines({"vllm-one-shot": other}, LISTED, Limits()) == {}


def test_rates_waste_and_savings():
    assert figures.rates(arm(), LISTED) == {"prompts": 0.5, "decided": 1.25, "texts": 4 / 6, "text_tokens": 14 / 6}
    assert figures.waste(arm()) == pytest.approx(6 / 100)
    assert figures.waste(arm(computed=None)) is None
    saved = figures.saved_by_threshold(arm(), LISTED)
    assert (saved["texts"], saved["kept_texts"], saved["tokens"], saved["kept_tokens"]) == (4, 2, 14, 6)
    assert (saved["tokens_saved"], saved["seconds_saved"], saved["same_texts"]) == (8, 3.5, 1.0)
    assert figures.saved_by_threshold(arm(kept_seconds=None), LISTED) is None


def test_the_cache_of_one_token():
    class Config:
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_size = 18, 4, 1, 256, 640

    assert kv_bytes_per_token(Config, "bfloat16") == 18 * 2 * 1 * 256 * 2


# Measuring


class Clock:
    """Every look at it takes a second, so each timed call takes one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Scripted(FakeEngine):
    """One-shot answers begin with the decision token that ``score`` would give."""

    def generate(self, prompts, limits, *, progress=lambda advance: None):
        completions = super().generate(prompts, limits, progress=progress)
        if limits.max_new_tokens < 9:
            return completions
        scores = super().score(prompts, LABELS, progress=progress)
        return [
            dataclasses.replace(completion, token_ids=(score.argmax, *completion.token_ids))
            for completion, score in zip(completions, scores, strict=True)
        ]


def task(**changes) -> Task:
    usual = Task(
        part="arm",
        engine="hf",
        mode="two-phase",
        model="model",
        model_root="0" * 64,
        prompts_file="prompts.jsonl",
        prompts_sha256="1" * 64,
        labels=LABELS.to_json(),
        max_tokens=8,
        dtype="float32",
        device="cpu",
        chunk_size=16,
    )
    return dataclasses.replace(usual, **changes)


PROMPTS = [Prompt(f"p{number}", (2, number + 100, 40, 41)) for number in range(50)]


def test_both_modes_write_the_same_list():
    first = Bench(Scripted(), task(), PROMPTS, Clock()).work()
    listed = make_write_list(first.decisions, first.skip_probabilities, first.texts, 0.25)
    assert listed.indices == tuple(index for index, decision in enumerate(first.decisions) if decision == "write")
    assert listed.kept == tuple(index for index in listed.indices if first.skip_probabilities[index] <= 0.25)
    assert 0 < len(listed.kept) < len(listed.indices) < 50
    assert max(listed.indices) < 48  # so nothing is written in the fourth chunk
    assert first.seconds == {"decide": 4.0, "write": 3.0}
    assert first.written_tokens == 50 + 3 * len(listed.indices)
    one = Bench(Scripted(), task(mode="one-shot", write_list=listed), PROMPTS, Clock()).work()
    assert one.seconds == {"one_shot": 1.0}
    assert (one.decisions, one.texts) == (first.decisions, first.texts)


def test_work_is_repeated_on_prompts_that_are_new_again():
    """Three times the work; the clock goes 2, 4 and 3 times as fast, and what the engine kept is dropped in between."""
    events = []

    class Caching(Scripted):
        def forget(self):
            events.append("forget")

        def score(self, prompts, labels, *, progress=lambda advance: None):
            events.append(len(prompts))
            return super().score(prompts, labels, progress=progress)

    class Paced(Clock):
        def __call__(self):
            self.now += (2, 4, 3)[events.count("forget")]
            return self.now

    works = Bench(Caching(), task(repeats=3), PROMPTS[:16], Paced()).repeated()
    assert events == [16, "forget", 16, "forget", 16]
    assert [work.work_seconds for work in works] == [4.0, 8.0, 6.0]
    assert median(works) is works[2]
    assert median(works[:2]) is works[1]
    assert works[0].texts == works[1].texts == works[2].texts
    assert len(Bench(Scripted(), task(repeats=2), PROMPTS[:16], Clock()).repeated()) == 2  # nothing to forget


def test_a_given_list_is_written_whatever_the_arm_decides():
    listed = WriteList((0, 17, 49), None, (3, 3, 3))
    engine = Scripted()
    work = Bench(engine, task(write_list=listed), PROMPTS, Clock()).work()
    assert engine.written == ["p0", "p17", "p49"]
    assert sorted(work.texts) == [0, 17, 49]


def test_warming_up_touches_no_measured_prompt():
    seen = []

    class Watching(Scripted):
        def score(self, prompts, labels, *, progress=lambda advance: None):
            seen.extend(prompt.token_ids for prompt in prompts)
            return super().score(prompts, labels, progress=progress)

    Bench(Watching(), task(), PROMPTS, Clock()).warm_up()
    assert seen and not {ids[:2] for ids in seen} & {prompt.token_ids[:2] for prompt in PROMPTS}
    assert {len(ids) for ids in seen} == {4}


def test_the_threshold_is_timed_before_and_after():
    """Three chunks of 16 have texts, two of them kept ones: each call takes a second."""
    listed = WriteList((0, 17, 18, 33), (0, 18), (3, 3, 3, 3))
    engine = Scripted()
    bench = Bench(engine, task(write_list=listed), PROMPTS, Clock())
    work = bench.work()
    assert bench.threshold_before_and_after(listed, work) == {"all": 3.0, "kept": 2.0, "same": 1.0}
    assert engine.written[-2:] == ["p0", "p18"]
    work.texts[18] = (99,)
    assert bench.threshold_before_and_after(listed, work)["same"] == 0.5
    assert bench.threshold_before_and_after(WriteList((0,), None, (3,)), work) is None
    assert bench.threshold_before_and_after(WriteList((0,), (), (3,)), work)["kept"] == 0.0


def test_tasks_and_results_survive_being_stored(tmp_path):
    with_list = task(write_list=LISTED, batch_size=8)
    assert Task.from_json(json.loads(json.dumps(with_list.to_json()))) == with_list
    assert with_list.digest != task().digest
    assert task(model="elsewhere").digest == task().digest
    assert ArmResult.from_json(json.loads(json.dumps(arm().to_json()))).texts == arm().texts
    write_work(PROMPTS, tmp_path / "work.jsonl")
    assert [prompt.token_ids for prompt in read_work(tmp_path / "work.jsonl")] == [prompt.token_ids for prompt in PROMPTS]


def test_only_distinct_prompts_are_taken_and_enough_of_them(tmp_path):
    rows = make_prompts(10)
    twins = [{**row, "id": f"twin {row['id']}"} for row in rows]
    path = write_lines(tmp_path / "p.jsonl", [*rows[:5], *twins[:5], *rows[5:]])
    taken = api.distinct_prompts(path, make_tokenizer(), api.BenchOptions(8), None)
    assert [prompt.id for prompt in taken] == [f"p{number}" for number in range(8)]
    with pytest.raises(GenerationError, match="holds 10 distinct prompts; --num-prompts asks for 11"):
        api.distinct_prompts(path, make_tokenizer(), api.BenchOptions(11), None)
    with pytest.raises(GenerationError, match=r"line 1: it holds token .* its embedding has 3, counted from 0"):
        api.distinct_prompts(path, make_tokenizer(), api.BenchOptions(8), None, vocabulary=3)
    write_lines(path, [rows[0], b"{"])
    with pytest.raises(GenerationError, match="line 2: broken JSON"):
        api.distinct_prompts(path, make_tokenizer(), api.BenchOptions(2), None)


def test_an_earlier_measurement_is_not_written_over(tmp_path):
    (tmp_path / "bench" / "parts").mkdir(parents=True)
    (tmp_path / "bench" / "parts" / "hf-two-phase.json").write_text("{}")
    prompts = write_lines(tmp_path / "p.jsonl", make_prompts(3))
    with pytest.raises(GenerationError, match="holds an earlier measurement; add --resume to go on with it, or give another"):
        api.bench_engines(tmp_path / "model", prompts, tmp_path / "bench", api.BenchOptions(2))
    assert [path.name for path in (tmp_path / "bench" / "parts").iterdir()] == ["hf-two-phase.json"]


def test_arms_are_those_that_can_run(monkeypatch):
    monkeypatch.setattr(api, "vllm_is_installed", lambda: False)
    said = []
    assert [arm.engine for arm in api.chosen_arms(None, said.append)] == ["hf", "hf"]
    assert "vLLM is not installed" in said[0]
    said.clear()
    assert [arm.engine for arm in api.chosen_arms(["hf-two-phase"], said.append)] == ["hf"] and not said
    with pytest.raises(GenerationError, match="vLLM is not installed"):
        api.chosen_arms(["vllm-two-phase"])
    with pytest.raises(GenerationError, match="'fast' is unknown"):
        api.chosen_arms(["fast"])
    monkeypatch.setattr(api, "vllm_is_installed", lambda: True)
    assert api.chosen_arms(None) == list(ARMS)


class NVML:
    """Stands for the module ``pynvml`` on a machine of two GPUs; ``used`` are bytes by handle."""

    class NVMLError(Exception):
        pass

    def __init__(self, used, broken=None):
        self.used, self.broken, self.begun = used, broken, 0

    def _ask(self, name, answer):
        if name == self.broken:
            raise self.NVMLError(name)
        return answer

    def nvmlInit(self):
        self.begun += 1
        self._ask("init", None)

    def nvmlDeviceGetCount(self):
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._ask("memory", SimpleNamespace(used=self.used[handle]))


@pytest.fixture
def nvml(monkeypatch):
    def give(module):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        memory._devices.cache_clear()
        return module

    yield give
    memory._devices.cache_clear()


def test_device_memory_is_the_peak_beyond_what_was_in_use(nvml):
    """Oracle: the bytes written out. NVML is opened once, however often it is asked."""
    library = nvml(NVML([3 << 30, 1 << 30]))
    assert memory.device_used() == 4 << 30
    with memory.MemoryWatch(os.getpid()) as watch:
        library.used[1] = 6 << 30
        time.sleep(1)
        library.used[1] = 2 << 30
        time.sleep(0.5)
    assert watch.device == 5 << 30
    assert library.begun == 1


@pytest.mark.parametrize("library", [None, NVML([]), NVML([1], "init"), NVML([1], "memory")])
def test_no_device_memory_where_nobody_tells(nvml, library):
    nvml(library)
    assert memory.device_used() is None
    with memory.MemoryWatch(os.getpid()) as watch:
        time.sleep(0.4)
    assert watch.device is None


def test_memory_of_a_process_and_its_children():
    """Oracle: a child that holds 200 MB on purpose."""
    import subprocess
    import sys

    hold = "import sys; block = bytearray(200_000_000); print(1, flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert 200e6 < memory.host_peak(process.pid) < 400e6
        process.stdin.close()


def test_the_load_of_others_is_what_is_busy_and_not_ours(monkeypatch):
    """Ten seconds of processor time went by in four seconds on two cores, four of them ours: six of eight."""
    busy, own, wall = iter([100.0, 110.0]), iter([5.0, 9.0]), iter([50.0, 54.0])
    monkeypatch.setattr(memory, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(memory, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(memory.time, "monotonic", lambda: next(wall))
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 2)
    assert memory.OtherLoad().share() == pytest.approx(0.75)


def test_busy_time_is_read_in_seconds():
    """Oracle: this process, busy for half a second of its own processor time."""
    before, own = memory._busy_seconds(), memory._own_seconds()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    assert memory._own_seconds() - own == pytest.approx(0.5, abs=0.1)
    assert memory._busy_seconds() - before > 0.35


def test_a_sample_of_the_list_is_spread_over_it():
    """Six prompts, of which the 1st, 3rd and 5th are a third each apart."""
    listed = WriteList((3, 4, 7, 9, 10, 12), (3, 4), (30, 10, 20, 50, 40, 60))
    assert listed.spread(3) == WriteList((3, 7, 10), None, (30, 20, 40))
    assert listed.spread(6) is listed.spread(None) is listed


def test_a_process_tells_how_far_it_is(tmp_path):
    """A line is said when twenty seconds have passed since the last look that was due, and the file says something."""
    seconds, said, path = iter([0, 19, 20, 39, 40, 60]), [], tmp_path / "p.json"
    lines = ProgressLines(path, "hf-two-phase", said.append, lambda: next(seconds))
    lines.look()  # too early
    lines.look()  # nothing there yet
    ProgressFile(path, Clock()).phase("deciding", 1200)(1000)
    lines.look()  # too early again
    assert said == []
    lines.look()
    assert said == ["hf-two-phase: deciding, 1,000 of 1,200"]
    path.write_text("[")
    lines.look()
    assert len(said) == 1


# From end to end


@pytest.fixture(scope="module")
def measured(pristine, tmp_path_factory):
    """Both Transformers arms and a sweep on the tiny model, through the command line."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = write_lines(folder / "prompts.jsonl", make_prompts(60))
    arguments = ["--model", pristine, "--prompts", prompts, "--num-prompts", 48, "--out", folder / "out", "--max-tokens", 8]
    arguments += [
        "--arms",
        "hf-two-phase,hf-one-shot",
        "--sweep",
        "4,16",
        "--sweep-prompts",
        5,
        "--stock",
        "--skip-threshold",
        0.4,
        "--dtype",
        "float32",
    ]
    done = CliRunner().invoke(main, [str(word) for word in arguments])
    return done, folder / "out", arguments


def test_two_arms_are_measured_in_their_processes(measured):
    done, folder, _ = measured
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "engines.json").read_text())
    assert report["prompts"]["number"] == 48
    proof = report["proof"]["hf-one-shot"]
    assert proof["holds"] and proof["agreement"] == 1.0 and proof["differing"] == 0.0
    (ratio,) = report["ratios"]
    seconds = {name: found["work_seconds"] for name, found in report["arms"].items()}
    assert (ratio["slow"], ratio["fast"]) == ("hf-one-shot", "hf-two-phase")
    assert ratio["total"] == pytest.approx(seconds["hf-one-shot"] / seconds["hf-two-phase"])
    two_phase = report["arms"]["hf-two-phase"]
    assert two_phase["decisions"]["write"] == report["prompts"]["to_write"] > 0
    assert two_phase["memory"]["host_peak"] > 100e6
    assert two_phase["threshold_before_writing"]["same_texts"] == 1.0
    assert [size["batch"] for size in report["sweep"]["sizes"]] == [4, 16]
    assert report["prompts"]["to_write"] > report["sweep"]["texts"] == 5
    swept = json.loads((folder / "parts" / "sweep-4.json").read_text())["result"]
    assert swept["tokens"] == report["sweep"]["sizes"][0]["tokens"] < report["prompts"]["text_tokens"]
    tokens = {size["tokens"] for size in [*report["sweep"]["sizes"], *report["stock"]["sizes"]]}
    assert len(tokens) == 1  # model.generate writes as much
    markdown = (folder / "engines.md").read_text()
    assert done.stdout.strip() == markdown.strip()
    assert "Within one engine, one-shot against two-phase: Transformers: decisions agree on 100.00%, 0.0% of" in markdown
    assert "At its best `model.generate` takes" in markdown
    for heading in ("## Same work", "## Times", "## Ratios", "## Threshold before writing", "## Generation batch"):
        assert heading in markdown
    for picture in ("times.png", "break-even.png", "sweep.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_is_not_measured_again(measured, monkeypatch):
    _, folder, arguments = measured
    before = (folder / "engines.json").read_text()
    monkeypatch.setattr(Runner, "_run", lambda self, task: pytest.fail(f"{task.name} was measured again"))
    done = CliRunner().invoke(main, [*map(str, arguments), "--resume", "--no-pictures"])
    assert done.exit_code == 0, done.output
    assert (folder / "engines.json").read_text() == before


def test_what_was_measured_elsewhere_is_measured_again(measured):
    _, folder, _ = measured
    stored = json.loads((folder / "parts" / "sweep-4.json").read_text())
    path, same_task = folder / "parts" / "sweep-4.json", SimpleNamespace(digest=stored["task"])
    assert Runner(path.parent, stored["machine"])._stored(path, same_task) == stored["result"]
    assert Runner(path.parent, {**stored["machine"], "cores": 0})._stored(path, same_task) is None


def test_a_size_that_had_to_be_halved_was_not_measured(pristine, monkeypatch):
    """Else the report would give 16 at once the seconds and the memory of 4."""
    through = LiveModel.last_logits

    def small(live, ids, **settings):
        if len(ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return through(live, ids, **settings)

    monkeypatch.setattr(LiveModel, "last_logits", small)
    sizes = [
        worker._measure_sweep(task(part="sweep", model=str(pristine), batch_size=size), PROMPTS, 0.0, tell_nobody)
        for size in (4, 16)
    ]
    assert sizes[0]["batch"] == 4 and sizes[0]["seconds"] > 0
    assert sizes[1]["failed"] == "the device's memory holds no more than 4 at once" and "seconds" not in sizes[1]


def test_different_work_gives_no_ratio_and_exit_1(measured, monkeypatch):
    """The stored one-shot arm is made to have written nothing; the report must refuse to divide."""
    _, folder, arguments = measured
    part = folder / "parts" / "hf-one-shot.json"
    original = part.read_text()
    content = json.loads(original)
    content["result"]["texts"] = {}
    part.write_text(json.dumps(content))
    try:
        done = CliRunner().invoke(main, [*map(str, arguments), "--resume", "--no-pictures"])
    finally:
        part.write_text(original)
    assert done.exit_code == 1
    assert "none: not the same work (tokens written differ by 100.00%" in done.stdout
    assert json.loads((folder / "engines.json").read_text())["ratios"] == []


def test_a_process_that_fails_is_one_line(tmp_path):
    with pytest.raises(GenerationError, match=r"hf-two-phase failed with exit code 1: .*; see .*hf-two-phase\.log"):
        Runner(tmp_path, {"cpu": "any"}).measure(task(prompts_file=str(tmp_path / "nowhere.jsonl")))


def test_a_file_as_the_folder_of_results_is_one_line(tmp_path):
    (tmp_path / "file").write_text("precious")
    given = ("--model", tmp_path, "--prompts", tmp_path / "file", "--num-prompts", 1, "--out", tmp_path / "file", "--no-pictures")
    done = CliRunner().invoke(main, [*map(str, given), "--arms", "hf-one-shot"])
    assert done.exit_code == 1 and done.stderr == f"error: {tmp_path / 'file'}: is a file; expected a folder as --out\n"


def test_results_are_not_written_into_the_checkpoint(tmp_path):
    """They would change what its certificate vouches for."""
    (tmp_path / "prompts.jsonl").write_text("{}")
    given = ("--model", tmp_path, "--prompts", tmp_path / "prompts.jsonl", "--num-prompts", 1, "--out", tmp_path / "bench")
    done = CliRunner().invoke(main, [*map(str, given), "--arms", "hf-one-shot", "--no-pictures"])
    assert done.exit_code == 1 and "lies in the checkpoint's folder and would change it" in done.stderr
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize("sizes", ["0", "a", "32,,64", "-1"])
def test_batch_sizes_that_are_none(sizes):
    done = CliRunner().invoke(main, ["--model", "m", "--prompts", "p", "--num-prompts", "1", "--sweep", sizes])
    assert done.exit_code == 2
    assert "expected batch sizes" in done.stderr


@pytest.mark.parametrize("names", ["fast", "hf-two-phase,fast", "", "hf-two-phase,"])
def test_arms_that_are_none(names):
    done = CliRunner().invoke(main, ["--model", "m", "--prompts", "p", "--num-prompts", "1", "--arms", names])
    assert done.exit_code == 2
    assert "expected some of hf-two-phase, vllm-two-phase, hf-one-shot, vllm-one-shot" in done.stderr
