// Vercel's AI SDK: the package ai with each of its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { after, before, suite, test } from "node:test";
import { ANSWER, City, LONG, MODEL, Person, startServer, TOO_LONG, WEATHER, weather } from "../server.js";

globalThis.AI_SDK_LOG_WARNINGS = false; // that it does not know the model

let server;

before(async () => {
  server = await startServer();
});

after(() => server.close());

const openai = () => createOpenAI({ baseURL: server.v1, apiKey: "no-key" });
const compatible = () =>
  createOpenAICompatible({ name: "ours", baseURL: server.v1, supportsStructuredOutputs: true });

// For each client, its variants: how each makes a model of a name.
const CLIENTS = {
  "@ai-sdk/openai": {
    responses: (name) => openai().responses(name),
    completions: (name) => openai().chat(name),
  },
  "@ai-sdk/openai-compatible": { completions: (name) => compatible()(name) },
  "@ai-sdk/anthropic": {
    messages: (name) => createAnthropic({ baseURL: server.v1, apiKey: "no-key" })(name),
  },
};

for (const [client, variants] of Object.entries(CLIENTS)) {
  suite(client, { timeout: 120_000 }, () => {
    for (const [variant, modelOf] of Object.entries(variants)) {
      const hello = () => ({ model: modelOf(MODEL), prompt: "Hello there", maxRetries: 0 });
      const tools = {
        weather: tool({ description: WEATHER.description, inputSchema: City, execute: weather }),
      };
      const agent = () => ({ ...hello(), tools, stopWhen: stepCountIs(4) });

      test(`chat[${variant}]`, async () => {
        assert.equal((await generateText(hello())).text, "Hello there");
      });

      test(`stream[${variant}]`, async () => {
        let text = "";
        for await (const delta of streamText(hello()).textStream) text += delta;
        assert.equal(text, "Hello there");
      });

      test(`tools[${variant}]`, async () => {
        assert.equal((await generateText(agent())).text, ANSWER);
      });

      test(`tools[${variant}, stream]`, async () => {
        assert.equal(await streamText(agent()).text, ANSWER);
      });

      test(`typed_answers[${variant}]`, async () => {
        const output = Output.object({ schema: Person });
        Person.parse((await generateText({ ...hello(), output })).output);
        Person.parse(await streamText({ ...hello(), output }).output);
      });

      test(`errors[${variant}]`, async () => {
        const raises = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status;
        await assert.rejects(generateText({ ...hello(), model: modelOf("nothing") }), raises(404));
        await assert.rejects(generateText({ ...hello(), prompt: TOO_LONG }), raises(400));
      });

      test(`aborts[${variant}]`, () =>
        server.aborts(async () => {
          const controller = new AbortController();
          const { textStream } = streamText({
            ...hello(),
            prompt: LONG,
            maxOutputTokens: 30_000,
            abortSignal: controller.signal,
          });
          for await (const _ of textStream) controller.abort();
        }));
    }
  });
}
