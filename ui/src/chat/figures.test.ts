import { expect, test } from "vitest";
import { lineOf } from "./figures";

const reply = { numPrompt: 1234, numCached: 80, numOutput: 11, numReasoning: 0, firstS: 0.5, totalS: 2.5 };

test("f37: the speed of a reply counts the tokens after the first, and the time after it", () => {
  expect(lineOf(reply)).toBe("11 tokens · 5.0 tokens/s · first after 500 ms · 80 of 1,234 prompt tokens cached");
});

test("f37: what a reply does not have is left out", () => {
  for (const one of [{ ...reply, totalS: 0.516 }, { ...reply, totalS: 0.5 }, { ...reply, numOutput: 1 }, { ...reply, numOutput: 0 }]) {
    expect(lineOf(one)).not.toMatch(/NaN|Infinity|tokens\/s/);
  }
  expect(lineOf({ ...reply, numOutput: 0 })).not.toContain("first");
  expect(lineOf({ ...reply, numPrompt: 0 })).not.toContain("cached");
});
