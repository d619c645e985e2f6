import { expect, test } from "vitest";
import { typedNumber } from "./typedNumber";

test("f37: a typed number is one that the field allows", () => {
  const whole = { min: "1", max: "100", step: "1" };
  for (const [typed, kept] of [[12.5, 13], [0, 1], [-3, 1], [1e9, 100], [7, 7]] as const) {
    expect(typedNumber({ ...whole, valueAsNumber: typed })).toBe(kept);
  }
  expect(typedNumber({ min: "0", max: "2", step: "0.1", valueAsNumber: 0.75 })).toBe(0.75);
  for (const none of [NaN, Infinity]) expect(typedNumber({ ...whole, valueAsNumber: none })).toBeNull();
});
