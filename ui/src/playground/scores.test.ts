import { expect, test } from "vitest";
import { sharesOf } from "./scores";

test("shares add up to 1, the likeliest first, and far scores do not overflow", () => {
  const shares = sharesOf({ a: -2, b: -1, c: -5000 });
  expect(shares.map(({ choice }) => choice)).toEqual(["b", "a", "c"]);
  expect(shares.reduce((sum, { share }) => sum + share, 0)).toBeCloseTo(1);
  expect(shares[0]!.share).toBeCloseTo(Math.E / (1 + Math.E));
  expect(sharesOf({ a: -Infinity, b: -Infinity }).map(({ share }) => share)).toEqual([0.5, 0.5]);
});
