import type { Stats } from "agentflow-client";
import { describe, expect, it } from "vitest";
import { pathOf, spanOf } from "../charts/LineChart";
import { Ring } from "../charts/ring";
import { addSample, savings, type Sample } from "../tree/savings";
import { headline, hitRate, totals } from "./figures";
import { parseScrape } from "./prometheus";
import { grouped, promptShares, type Request } from "./requests";
import textAfter from "./scrape-after.txt?raw";
import { scrapeOfStats } from "./scrapes";
import { barPaths, StepLog, type Step } from "./steps";

const request = (id: number, more: Partial<Request> = {}): Request => ({
  id,
  tenant: "a",
  program: "p",
  status: "running",
  prompt_tokens: 100,
  cached_tokens: 60,
  computed_tokens: 80,
  output_tokens: 5,
  age_s: id,
  ...more,
});
const step = (number: number, prefill = 0, decode = 1): Step => [number, prefill, decode, 1, 0, 10, 20];

describe("grouped", () => {
  it("sums the requests of each program and tenant", () => {
    const groups = grouped([
      request(1),
      request(2, { status: "waiting" }),
      request(3),
      request(4, { tenant: "b" }),
      request(5, { program: "" }),
    ]);
    expect(groups.map((group) => [group.program, group.tenant, group.running, group.waiting])).toEqual([
      ["", "a", 1, 0],
      ["p", "a", 2, 1],
      ["p", "b", 1, 0],
    ]);
    expect(groups[1]).toMatchObject({ promptTokens: 300, cachedTokens: 180, outputTokens: 15, oldestS: 3 });
    expect(groups[1]!.requests.map(({ id }) => id)).toEqual([3, 1, 2]);
  });

  it("keeps apart names that would be equal when joined", () => {
    expect(
      grouped([request(1, { program: "a", tenant: "b,c" }), request(2, { program: "a,b", tenant: "c" })]),
    ).toHaveLength(2);
  });

  it.each([
    [request(1), 0.6, 0.2],
    [request(1, { computed_tokens: 140 }), 0.6, 0.4],
    [request(1, { computed_tokens: 20 }), 0.6, 0],
    [request(1, { prompt_tokens: 0 }), 0, 0],
  ])("splits a prompt into what was cached and what is computed", (one, cached, computed) => {
    expect(promptShares(one).cached).toBeCloseTo(cached);
    expect(promptShares(one).computed).toBeCloseTo(computed);
  });
});

describe("steps", () => {
  const numbersOf = (log: StepLog): number[] => log.toArray().map(([number]) => number);

  it("are taken once, and again from an engine that was started again", () => {
    const log = new StepLog(4);
    log.add([step(4), step(5)], "m");
    log.add([step(4), step(5), step(6)], "m");
    log.add([], "m");
    expect(numbersOf(log)).toEqual([4, 5, 6]);
    log.add([step(1), step(2)], undefined);
    expect(numbersOf(log)).toEqual([5, 6, 1, 2]);
  });

  it("f37: are of one model", () => {
    const log = new StepLog(9);
    log.add([step(4), step(5)], "small");
    log.add([step(6), step(7)], "large");
    expect(numbersOf(log)).toEqual([6, 7]);
    log.add([step(3)], "small");
    expect(numbersOf(log)).toEqual([3]);
  });

  it("are bars whose parts stand on each other", () => {
    const { decode, prefill } = barPaths([step(1, 0, 2), step(2, 3, 1)], 100, 50, 6, 10);
    expect(decode).toBe("M88.0 30.0h5v20.0h-5zM94.0 40.0h5v10.0h-5z");
    expect(prefill).toBe("M94.0 10.0h5v30.0h-5z");
  });
});

describe("a session's own stats", () => {
  it("give the same hit rate and sums as a scrape, and nothing about the engine as a whole", () => {
    const scrape = parseScrape(textAfter);
    const of = (labels = {}): number => scrape.sum("agentflow_prompt_tokens_total", labels) ?? 0;
    const stats = {
      model: "smollm2-135m",
      prompt_tokens: of(),
      cached_tokens: of() - of({ source: "computed" }),
      generated_tokens: scrape.sum("agentflow_generated_tokens_total"),
    };
    const own = scrapeOfStats(stats, [request(1), request(2, { status: "waiting" }), request(3)], 0);
    const values = Object.fromEntries(
      headline(own, null, "smollm2-135m").map(({ name, value }) => [name, value]),
    );
    expect(values).toMatchObject({ Running: 2, Waiting: 1, "KV pool in use": null });
    expect(hitRate(own, null, "smollm2-135m")).toBe(hitRate(scrape, null, "smollm2-135m"));
    const sums = (one: typeof own) => totals(one, "smollm2-135m").filter(({ value }) => value !== null);
    for (const { name, value } of sums(own)) {
      expect(sums(scrape).find((figure) => figure.name === name)?.value).toBe(value);
    }
    expect(sums(own).map(({ name }) => name)).toEqual(["Prompt tokens computed", "Tokens generated"]);
  });
});

describe("savings", () => {
  const at = (atS: number, promptTokens: number, cachedTokens: number) => ({
    model: "m",
    atS,
    promptTokens,
    cachedTokens,
  });

  it("are the hit rate of the last seconds and of all, and the tokens that were not computed", () => {
    expect(savings([at(0, 0, 0), at(5, 100, 50), at(12, 200, 140), at(40, 200, 140)])).toEqual({
      recent: [null, 0.5, 0.9, null],
      overall: [null, 0.5, 0.7, 0.7],
      saved: [0, 50, 140, 140],
    });
  });

  it("f37: are of one model", () => {
    const samples = new Ring<Sample>(9);
    const add = (model: string, prompt_tokens: number, cached_tokens: number): void =>
      addSample(samples, { model, prompt_tokens, cached_tokens } as Stats, samples.length);
    add("small", 100, 90);
    add("large", 1000, 0);
    add("large", 1100, 50);
    expect(savings(samples.toArray()).recent).toEqual([null, 0.5]);
  });

  it("begin again with the engine", () => {
    expect(savings([at(0, 100, 90), at(1, 10, 0), at(2, 20, 5)]).recent).toEqual([null, null, 0.5]);
  });
});

describe("charts", () => {
  it("break a line where a value is unknown, and begin at the left edge", () => {
    const points = [
      [0, 1],
      [1, 2],
      [2, null],
      [3, 4],
    ].map(([atS, value]) => ({ atS: atS as number, value: value ?? null }));
    const path = pathOf(
      points,
      (x) => x * 10,
      (y) => y,
      5,
      null,
    );
    expect(path).toBe("M10.0 2.0M30.0 4.0");
    expect(
      pathOf(
        points.slice(0, 2),
        (x) => x * 10,
        (y) => y,
        0,
        9,
      ),
    ).toBe("M0.0 1.0L10.0 2.0L10.0 9.0L0.0 9.0Z");
  });

  it("show half a minute at first, and two minutes at most", () => {
    expect([spanOf([]), spanOf([{ atS: 5 }, { atS: 50 }]), spanOf([{ atS: 0 }, { atS: 900 }])]).toEqual([
      30, 50, 120,
    ]);
  });
});
