import { expect, test } from "vitest";
import { calculate } from "./calculate";
import { runTool } from "./tools";

test.each([
  ["1 + 2 * 3", 7],
  ["(1 + 2) * 3", 9],
  ["-2 ^ 2", -4],
  ["2 ** 3 ** 2", 512],
  ["10 - 4 - 3", 3],
  ["7 % 4 / 2", 1.5],
  [".5e1 + 1.", 6],
  ["2 * -3", -6],
])("%s is %d", (expression, value) => {
  expect(calculate(expression)).toBe(value);
});

test.each(["", "1 +", "(1", "1 2", "alert(1)", "1;2", "(".repeat(5000)])("%s is refused", (expression) => {
  expect(() => calculate(expression)).toThrow();
});

test("a tool that is not there, and arguments that are no JSON, are answered with a sentence", () => {
  expect(runTool("rm", "{}")).toMatch(/no tool/);
  expect(runTool("calculator", '{"expression')).toMatch(/failed/);
  expect(runTool("calculator", '{"expression": "6*7"}')).toBe("42");
});
