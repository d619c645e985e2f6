// The server under test, and what every client is tested with: a tool, its result, and a typed answer.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { z } from "zod";

const HERE = new URL(".", import.meta.url);
const PYTHON = process.env.AGENTFLOW_PYTHON ?? fileURLToPath(new URL("../../../.venv/bin/python", HERE));

export const MODEL = "fake";
/** What the model says once a tool has returned. */
export const ANSWER = "It is sunny in Oslo.";
/** The model repeats it, unless the client aborts. */
export const LONG = "word ".repeat(4000);
/** Longer than the model's context. */
export const TOO_LONG = "a".repeat(70_000);

export const Person = z.object({
  name: z.string(),
  age: z.number().int(),
  mood: z.enum(["glad", "sad"]),
  tags: z.array(z.string()),
});

export const City = z.object({ city: z.string() });
export const WEATHER = { name: "weather", description: "Returns the weather." };
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export function weather({ city }) {
  assert.equal(city, "Oslo");
  return "sunny";
}

/** Starts a server. It ends with this process. */
export async function startServer() {
  const server = spawn(PYTHON, [fileURLToPath(new URL("../server.py", HERE))], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  const [url] = await once(createInterface(server.stdout), "line");
  return {
    url,
    v1: `${url}/v1`,
    close: async () => {
      server.stdin.end();
      await once(server, "exit");
    },
    /** Checks that the server stops an answer to `LONG` that a client stops reading in the function. */
    aborts: async (read) => {
      const before = await count(url, "agentflow_generated_tokens_total");
      await read();
      while ((await count(url, "agentflow_running_requests")) > 0);
      const generated = (await count(url, "agentflow_generated_tokens_total")) - before;
      assert.ok(generated > 0 && generated < LONG.length / 2, `${generated} tokens`);
    },
  };
}

/** The sum of a metric over its labels. */
async function count(url, metric) {
  const text = await (await fetch(`${url}/metrics`)).text();
  const values = text.matchAll(new RegExp(`^${metric}(?:{.*})? (\\S+)$`, "gm"));
  return [...values].reduce((sum, [, value]) => sum + Number(value), 0);
}
