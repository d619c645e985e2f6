// The numbers of the scheduler view, each derived from scrapes of `/metrics`.
//
// Every number carries the PromQL expression that gives the same value, so that a reader can find it in a
// dashboard. Gauges and totals are those of the newest scrape. Rates compare it with the newest scrape that is at
// least a window older.

import { compact, count, duration, percent } from "../charts/numbers";
import type { Histogram, Labels, Scrape } from "./prometheus";
import { observations, quantile, since } from "./prometheus";

/** One number of the view. `value`: null where `/metrics` has none (yet). `query`: PromQL with the same value. */
export interface Figure {
  readonly name: string;
  readonly value: number | null;
  readonly text: string;
  readonly query: string;
  readonly note?: string;
}

const isCached = (source: string): boolean => source !== "computed";

/** The models that the scrape knows, in its order, with those behind APIs, which have no engine. */
export function modelsOf(scrape: Scrape): string[] {
  const names = ["agentflow_engine_up", "agentflow_running_requests"].flatMap((name) => scrape.values(name, "model"));
  return [...new Set(names)];
}

/** Tokens of the KV pool by state. */
export interface KvUse {
  readonly inUse: number;
  readonly cached: number;
  readonly free: number;
}

export function kvUse(scrape: Scrape, model: string): KvUse | null {
  const of = (state: string): number | null => scrape.sum("agentflow_kv_tokens", { model, state });
  const [inUse, cached, free] = [of("in_use"), of("cached"), of("free")];
  return inUse === null || cached === null || free === null ? null : { inUse, cached, free };
}

/** The growth of a counter between two scrapes, which starts again at 0 where the server did. */
export function increase(now: number | null, before: number | null): number | null {
  if (now === null) return null;
  return before === null || now < before ? now : now - before;
}

/** The growth per second; null where the scrapes have no time between them. */
export function rate(now: Scrape, before: Scrape | null, name: string, labels: Labels): number | null {
  if (before === null || now.atS <= before.atS) return null;
  const grown = increase(now.sum(name, labels), before.sum(name, labels));
  return grown === null ? null : grown / (now.atS - before.atS);
}

/** The share of prompt tokens that came from the cache: of all since the server started, or, with `before`, of
 * those since that scrape. */
export function hitRate(now: Scrape, before: Scrape | null, model: string): number | null {
  const name = "agentflow_prompt_tokens_total";
  const grown = (labels: Labels): number | null =>
    before === null ? now.sum(name, labels) : increase(now.sum(name, labels), before.sum(name, labels));
  const cached = grown({ model, source: isCached });
  const all = grown({ model });
  return cached === null || all === null || all === 0 ? null : cached / all;
}

/** The numbers at the top of the view. `before`: a scrape some seconds older, for rates. */
export function headline(now: Scrape, before: Scrape | null, model: string): Figure[] {
  const window = before === null ? 0 : Math.max(1, Math.round(now.atS - before.atS));
  const m = selector({ model });
  const gauge = (name: string, metric: string): Figure =>
    figure(name, now.sum(metric, { model }), count, `${metric}${m}`);
  const perSecond = (name: string, metric: string): Figure =>
    figure(
      name,
      rate(now, before, metric, { model }),
      compact,
      `rate(${metric}${m}[${window}s])`,
      before === null ? "after the second scrape" : `over the last ${window} s`,
    );
  const kv = kvUse(now, model);
  const pool = kv === null ? 0 : kv.inUse + kv.cached + kv.free;
  return [
    gauge("Running", "agentflow_running_requests"),
    gauge("Waiting", "agentflow_waiting_requests"),
    perSecond("Generated tokens / s", "agentflow_generated_tokens_total"),
    perSecond("Computed tokens / s", "agentflow_computed_tokens_total"),
    figure(
      "Cache hit rate",
      hitRate(now, null, model),
      percent,
      `sum(agentflow_prompt_tokens_total${selector({ model }, 'source!="computed"')}) / sum(agentflow_prompt_tokens_total${m})`,
      "of prompt tokens since the server started",
    ),
    figure(
      "KV pool in use",
      kv === null || pool === 0 ? null : kv.inUse / pool,
      percent,
      `sum(agentflow_kv_tokens${selector({ model, state: "in_use" })}) / sum(agentflow_kv_tokens${m})`,
      kv === null ? undefined : `${count(kv.inUse)} of ${count(pool)} tokens, without cached ones`,
    ),
  ];
}

/** Totals since the server started. */
export function totals(now: Scrape, model: string): Figure[] {
  const m = selector({ model });
  const counter = (name: string, metric: string): Figure =>
    figure(name, now.sum(metric, { model }), count, `${metric}${m}`);
  const prompt = (name: string, source: string): Figure =>
    figure(
      name,
      now.sum("agentflow_prompt_tokens_total", { model, source }),
      count,
      `agentflow_prompt_tokens_total${selector({ model, source })}`,
    );
  return [
    prompt("Prompt tokens computed", "computed"),
    prompt("Prompt tokens from earlier prompts", "prompt_cache"),
    prompt("Prompt tokens from earlier outputs", "output_cache"),
    counter("Tokens generated", "agentflow_generated_tokens_total"),
    counter("Tokens forced by a constraint", "agentflow_forced_tokens_total"),
    counter("Tokens evicted from the cache", "agentflow_evicted_tokens_total"),
    counter("Forward passes", "agentflow_steps_total"),
    counter("Requests preempted", "agentflow_preemptions_total"),
    counter("Engine restarts", "agentflow_engine_restarts_total"),
  ];
}

/** A row of the table of latencies: one histogram with its percentiles. */
export interface Latency {
  readonly name: string;
  readonly meaning: string;
  readonly metric: string;
  readonly number: Figure;
  readonly percentiles: readonly Figure[];
  readonly mean: Figure;
}

export const PERCENTILES = [50, 90, 99] as const;

const LATENCIES = [
  ["TTFT", "from accepting a generation to its first token", "agentflow_ttft_seconds"],
  ["TPOT", "mean time per output token after the first", "agentflow_tpot_seconds"],
  ["Queue", "from accepting a request to its first batch", "agentflow_queue_wait_seconds"],
] as const;

/** Percentiles of the histograms: of all observations since the server started, or, with `before`, of those
 * since that scrape. */
export function latencies(now: Scrape, before: Scrape | null, model: string): Latency[] {
  const window = before === null ? 0 : Math.max(1, Math.round(now.atS - before.atS));
  const m = selector({ model });
  const over = (metric: string): string => (before === null ? metric : `increase(${metric}[${window}s])`);
  return LATENCIES.map(([name, meaning, metric]) => {
    const all = now.histogram(metric, { model });
    const shown = before === null ? all : since(all, before.histogram(metric, { model }));
    return {
      name,
      meaning,
      metric,
      number: figure("Number", shown && observations(shown), count, `sum(${over(`${metric}_count${m}`)})`),
      percentiles: PERCENTILES.map((p) =>
        figure(
          `p${p}`,
          quantile(shown, p / 100),
          duration,
          `histogram_quantile(${p / 100}, sum by (le) (${over(`${metric}_bucket${m}`)}))`,
        ),
      ),
      mean: figure(
        "Mean",
        meanOf(shown),
        duration,
        `sum(${over(`${metric}_sum${m}`)}) / sum(${over(`${metric}_count${m}`)})`,
      ),
    };
  });
}

function meanOf(histogram: Histogram | null): number | null {
  const number = observations(histogram);
  return histogram === null || number === 0 ? null : histogram.sum / number;
}

function figure(
  name: string,
  value: number | null,
  format: (value: number) => string,
  query: string,
  note?: string,
): Figure {
  const text = value === null || !Number.isFinite(value) ? "–" : format(value);
  return note === undefined ? { name, value, text, query } : { name, value, text, query, note };
}

function selector(labels: Readonly<Record<string, string>>, extra = ""): string {
  const pairs = Object.entries(labels).map(([label, value]) => `${label}=${JSON.stringify(value)}`);
  return `{${[...pairs, ...(extra === "" ? [] : [extra])].join(",")}}`;
}
