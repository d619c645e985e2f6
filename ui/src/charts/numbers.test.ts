import { describe, expect, it } from "vitest";
import { compact, counted, duration, percent } from "./numbers";
import { Ring } from "./ring";
import { ticks, ticksBetween } from "./ticks";

describe("numbers", () => {
  it.each([
    [0, "0"],
    [0.25, "0.3"],
    [7, "7"],
    [999, "999"],
    [999.7, "1.0k"],
    [12_345, "12.3k"],
    [999_999, "1.0M"],
    [123_456_789, "123M"],
  ])("writes %d compactly as %s", (value, text) => {
    expect(compact(value)).toBe(text);
  });

  it.each([
    [0, "0 s"],
    [0.00005, "50 µs"],
    [0.0123, "12.3 ms"],
    [0.5, "500 ms"],
    [0.9999, "1.00 s"],
    [1.236, "1.24 s"],
    [12.34, "12.3 s"],
    [200, "3 min 20 s"],
    [7260, "2 h 1 min"],
    [NaN, "–"],
  ])("writes %d seconds as %s", (seconds, text) => {
    expect(duration(seconds)).toBe(text);
  });

  it("writes shares and counts", () => {
    expect([0, 0.004, 0.0996, 0.824, 1].map(percent)).toEqual(["0%", "0.4%", "10%", "82%", "100%"]);
    expect([0.994, 0.9953, 0.99999].map(percent)).toEqual(["99%", "99.5%", "99.9%"]);
    expect(percent(null)).toBe("–");
    expect([counted(1, "token"), counted(1234, "token")]).toEqual(["1 token", "1,234 tokens"]);
  });
});

describe("ticks", () => {
  it("covers the largest value with few round steps", () => {
    for (const most of [1e-6, 0.3, 1, 3, 7.7, 10, 99, 1234, 5e9]) {
      const found = ticks(most);
      expect(found[0]).toBe(0);
      expect(found.at(-1)).toBeGreaterThanOrEqual(most);
      expect(found.at(-2)).toBeLessThan(most);
      expect(found.length).toBeLessThanOrEqual(6);
    }
    expect(ticks(100)).toEqual([0, 50, 100]);
    expect(ticks(2, 4, true)).toEqual([0, 1, 2]);
    expect(ticks(0)).toEqual([0, 1]);
  });

  it("stays inside a range", () => {
    expect(ticksBetween(0.13, 0.55, 5)).toEqual([0.2, 0.3, 0.4, 0.5]);
    expect(ticksBetween(1, 1)).toEqual([]);
  });
});

describe("Ring", () => {
  it("keeps the newest", () => {
    const ring = new Ring<number>(3);
    ring.push(1, 2);
    ring.push(3, 4);
    expect(ring.toArray()).toEqual([2, 3, 4]);
    ring.push(5, 6, 7, 8);
    expect(ring.toArray()).toEqual([6, 7, 8]);
    expect(ring.newest((value) => value < 8)).toBe(7);
    expect(ring.newest((value) => value > 8)).toBeUndefined();
  });
});
