import { describe, expect, it } from "vitest";
import { headline, hitRate, increase, kvUse, latencies, modelsOf, rate, totals } from "./figures";
import { parseScrape } from "./prometheus";
import textAfter from "./scrape-after.txt?raw";
import textBefore from "./scrape-before.txt?raw";

/** Two real scrapes of a server that ran examples/tree_of_thought.py in between. */
const before = parseScrape(textBefore, 100);
const after = parseScrape(textAfter, 110);
const MODEL = "smollm2-135m";

const values = (figures: readonly { name: string; value: number | null }[]) =>
  Object.fromEntries(figures.map(({ name, value }) => [name, value]));

describe("the figures of a saved scrape", () => {
  it("finds the models", () => {
    expect(modelsOf(after)).toEqual([MODEL]);
    const lines = ['agentflow_engine_up{model="small"} 1', 'agentflow_running_requests{model="small"} 0'];
    const both = [...lines, 'agentflow_running_requests{model="gpt"} 1'].join("\n");
    expect(modelsOf(parseScrape(both, 0))).toEqual(["small", "gpt"]);
  });

  it("shows gauges as they are, and rates between the scrapes", () => {
    const shown = values(headline(after, before, MODEL));
    expect(shown).toEqual({
      Running: 0,
      Waiting: 0,
      "Generated tokens / s": 25.7,
      "Computed tokens / s": 64.3,
      "Cache hit rate": (1855 + 1058) / (1855 + 1058 + 405),
      "KV pool in use": 0,
    });
    expect(kvUse(after, MODEL)).toEqual({ inUse: 0, cached: 630, free: 64906 });
  });

  it("shows totals as the counters have them", () => {
    expect(values(totals(after, MODEL))).toEqual({
      "Prompt tokens computed": 405,
      "Prompt tokens from earlier prompts": 1855,
      "Prompt tokens from earlier outputs": 1058,
      "Tokens generated": 259,
      "Tokens forced by a constraint": 0,
      "Tokens evicted from the cache": 0,
      "Forward passes": 93,
      "Requests preempted": 0,
      "Engine restarts": 0,
    });
  });

  it("interpolates percentiles as Prometheus does", () => {
    const [ttft, tpot, queue] = latencies(after, null, MODEL);
    // 15 observations: 1 up to 0.03 s, 12 up to 0.1 s, 15 up to 0.3 s.
    expect(ttft?.number.value).toBe(15);
    expect(ttft?.percentiles[0]?.value).toBeCloseTo(0.03 + 0.07 * ((7.5 - 1) / 11), 12);
    expect(ttft?.percentiles[1]?.value).toBeCloseTo(0.1 + 0.2 * ((13.5 - 12) / 3), 12);
    expect(ttft?.mean.value).toBeCloseTo(1.250536926996574 / 15, 12);
    // All 12 lie between 0.02 and 0.05 s.
    expect(tpot?.percentiles[0]?.value).toBeCloseTo(0.02 + 0.03 / 2, 12);
    expect(queue?.number.value).toBe(31);
  });

  it("shows only what came since the earlier scrape", () => {
    expect(latencies(after, after, MODEL)[0]?.number.value).toBe(0);
    expect(latencies(after, after, MODEL)[0]?.percentiles[0]).toMatchObject({ value: null, text: "–" });
    expect(hitRate(after, before, MODEL)).toBeCloseTo(2913 / (2913 + 401), 12);
    expect(hitRate(after, after, MODEL)).toBeNull();
  });

  it("names a query for each number, with a metric that the scrape has", () => {
    const lists = latencies(after, before, MODEL).flatMap((one) => [
      one.number,
      one.mean,
      ...one.percentiles,
    ]);
    for (const { query } of [...headline(after, before, MODEL), ...totals(after, MODEL), ...lists]) {
      const names = query.match(/agentflow_\w+/g) ?? [];
      expect(names).not.toHaveLength(0);
      for (const name of names) expect(after.select(name), query).not.toHaveLength(0);
    }
  });

  it("has no numbers for a model that the scrape does not know", () => {
    expect(headline(after, before, "other").map((one) => one.text)).toEqual(Array(6).fill("–"));
  });
});

describe("counters", () => {
  it("start again where the server did", () => {
    expect(increase(7, 5)).toBe(2);
    expect(increase(3, 5)).toBe(3);
    expect(increase(3, null)).toBe(3);
    expect(increase(null, 3)).toBeNull();
  });

  it("have no rate without time between two scrapes", () => {
    const name = "agentflow_steps_total";
    expect(rate(after, null, name, {})).toBeNull();
    expect(rate(after, after, name, {})).toBeNull();
    expect(rate(after, before, name, { model: MODEL })).toBeCloseTo(9.1, 12);
  });
});
