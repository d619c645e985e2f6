import { describe, expect, it } from "vitest";
import { observations, parseScrape, quantile, since, type Histogram } from "./prometheus";

describe("parseScrape", () => {
  it("reads names, labels, values and time stamps", () => {
    const scrape = parseScrape(
      [
        "# HELP a b",
        "# TYPE a gauge",
        "a 1",
        'b{x="1",y="two"} 2.5e3 1700000000',
        'c{ x = "1" , } +Inf',
        "d{} NaN",
      ].join("\n"),
    );
    expect(scrape.select("a")).toEqual([{ name: "a", labels: {}, value: 1 }]);
    expect(scrape.select("b")).toEqual([{ name: "b", labels: { x: "1", y: "two" }, value: 2500 }]);
    expect(scrape.sum("c", { x: "1" })).toBe(Infinity);
    expect(scrape.sum("d")).toBeNaN();
  });

  it("reads escapes, and braces and commas inside of values", () => {
    const scrape = parseScrape(String.raw`a{x="one \"two\"\n\\three",y="},{"} 1`);
    expect(scrape.select("a")[0]?.labels).toEqual({ x: 'one "two"\n\\three', y: "},{" });
  });

  it.each(["a", "a{", 'a{x="1} 2', "{} 1", "1 2", 'a{x="1"', "a b", "<!doctype html>"])(
    "skips the line %j and reads the others",
    (line) => {
      const scrape = parseScrape(`${line}\nok 1\r\n`);
      expect(scrape.sum("ok")).toBe(1);
      expect(scrape.sum("a")).toBeNull();
    },
  );

  it("sums over the labels that a selector leaves open", () => {
    const scrape = parseScrape('a{m="x",k="1"} 1\na{m="x",k="2"} 2\na{m="y",k="1"} 4\n');
    expect(scrape.sum("a", { m: "x" })).toBe(3);
    expect(scrape.sum("a", { k: (value) => value !== "1" })).toBe(2);
    expect(scrape.sum("a", { m: "z" })).toBeNull();
    expect(scrape.values("a", "m")).toEqual(["x", "y"]);
  });

  it("adds histograms with other labels", () => {
    const lines = ["1", "2"].flatMap((tenant) => [
      `h_bucket{le="0.5",tenant="${tenant}"} 1`,
      `h_bucket{le="+Inf",tenant="${tenant}"} 3`,
      `h_sum{tenant="${tenant}"} 4`,
    ]);
    expect(parseScrape(lines.join("\n")).histogram("h")).toEqual({
      bounds: [0.5, Infinity],
      counts: [2, 6],
      sum: 8,
    });
  });
});

describe("quantile", () => {
  const of = (...counts: number[]): Histogram => ({ bounds: [1, 2, 4, Infinity], counts, sum: 0 });

  it("is linear within a bucket", () => {
    expect(quantile(of(0, 10, 10, 10), 0.5)).toBe(1.5);
    expect(quantile(of(10, 10, 10, 10), 0.5)).toBe(0.5);
    expect(quantile(of(5, 5, 10, 10), 0.75)).toBe(3);
  });

  it("is the last bound beyond it, and nothing without observations", () => {
    expect(quantile(of(0, 0, 0, 10), 0.5)).toBe(4);
    expect(quantile(of(0, 0, 0, 0), 0.5)).toBeNull();
    expect(quantile(null, 0.5)).toBeNull();
  });

  it("lies in the bucket that holds the rank, for all observations", () => {
    // Against the definition: sort the observations' bucket bounds and take the one at the rank.
    for (let seed = 1; seed < 200; seed++) {
      const sizes = [seed % 5, (seed * 7) % 4, (seed * 3) % 6, (seed * 11) % 3];
      const counts = sizes.map((_, i) => sizes.slice(0, i + 1).reduce((a, b) => a + b, 0));
      const sorted = sizes.flatMap((size, i) => Array<number>(size).fill(i));
      for (const q of [0.01, 0.5, 0.9, 1]) {
        const value = quantile(of(...counts), q);
        if (sorted.length === 0) {
          expect(value).toBeNull();
          continue;
        }
        const bucket = sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] as number;
        const edges = [0, 1, 2, 4, 4];
        expect(value).toBeGreaterThanOrEqual(edges[bucket] as number);
        expect(value).toBeLessThanOrEqual(edges[bucket + 1] as number);
      }
    }
  });
});

describe("since", () => {
  it("subtracts, unless the server began anew", () => {
    const early = { bounds: [1, Infinity], counts: [1, 2], sum: 3 };
    const late = { bounds: [1, Infinity], counts: [4, 6], sum: 10 };
    expect(since(late, early)).toEqual({ bounds: [1, Infinity], counts: [3, 4], sum: 7 });
    expect(since(early, late)).toEqual(early);
    expect(since(late, null)).toEqual(late);
    expect(observations(since(late, early))).toBe(4);
  });
});
