// The JavaScript blocks of docs/guides/clients.md.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { after, before, suite, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { MODEL, startServer } from "../server.js";

const GUIDE = new URL("../../../../docs/guides/clients.md", import.meta.url);
const BUILD = new URL("../build/", import.meta.url); // below node_modules' folder, where imports find packages
const CLIENTS = {
  OpenAI: "openai",
  Anthropic: "@anthropic-ai/sdk",
  "Vercel AI SDK": "@ai-sdk/openai-compatible",
};

let server;

before(async () => {
  server = await startServer();
  await mkdir(BUILD, { recursive: true });
});

after(async () => {
  await server.close();
  await rm(BUILD, { recursive: true });
});

const sections = (await readFile(GUIDE, "utf8")).split("\n## ").slice(1);

for (const [heading, client] of Object.entries(CLIENTS)) {
  suite(client, { timeout: 60_000 }, () => {
    test("guide", async () => {
      const section = sections.find((one) => one.startsWith(`${heading}\n`));
      const [, block] = section.match(/^```js\n(.*?)^```$/ms);
      assert.ok(block.includes("http://127.0.0.1:8410"));
      const source = block
        .replaceAll("http://127.0.0.1:8410", server.url)
        .replaceAll("smollm2-135m", MODEL);
      const file = fileURLToPath(new URL(`${heading.replaceAll(" ", "")}.mjs`, BUILD));
      await writeFile(file, source);
      const { stdout } = await promisify(execFile)(process.execPath, [file]);
      assert.notEqual(stdout.trim(), "");
    });
  });
}
