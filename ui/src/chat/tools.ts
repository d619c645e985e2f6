// Tools that the page runs itself, when the user allows a call. None of them has an effect.
import type { ToolSpec } from "agentflow-client";
import { calculate } from "./calculate";

interface PageTool extends ToolSpec {
  run(given: Record<string, unknown>): string;
}

const TOOLS: readonly PageTool[] = [
  {
    name: "calculator",
    description: "Calculates an arithmetic expression, such as (2 + 3) * 4.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", pattern: "^[-+*/%^() .0-9]{1,60}$" } },
      required: ["expression"],
      additionalProperties: false,
    },
    run: ({ expression }) => String(calculate(String(expression))),
  },
  {
    name: "clock",
    description: "The date and the time now, where the user is.",
    parameters: { type: "object", properties: {}, additionalProperties: false },
    run: () => new Date().toString(),
  },
];

export const SPECS: readonly ToolSpec[] = TOOLS.map(({ name, description, parameters }) => ({
  name,
  description,
  parameters,
}));

/** The tool's answer, or a sentence about what was wrong with the call. */
export function runTool(name: string, argumentsText: string): string {
  const tool = TOOLS.find((one) => one.name === name);
  if (!tool) return `There is no tool named ${name}.`;
  try {
    return tool.run(JSON.parse(argumentsText) as Record<string, unknown>);
  } catch (error) {
    return `The call failed: ${error instanceof Error ? error.message : String(error)}`;
  }
}
