// The client of Anthropic.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import assert from "node:assert/strict";
import { after, before, suite, test } from "node:test";
import { ANSWER, City, LONG, MODEL, Person, startServer, TOO_LONG, WEATHER, weather } from "../server.js";

const HELLO = { model: MODEL, max_tokens: 200, messages: [{ role: "user", content: "Hello there" }] };

suite("@anthropic-ai/sdk", { timeout: 120_000 }, () => {
  let server, client;

  before(async () => {
    server = await startServer();
    client = new Anthropic({ baseURL: server.url, apiKey: "no-key", maxRetries: 0 });
  });

  after(() => server.close());

  test("chat", async () => {
    const answer = await client.messages.create(HELLO);
    assert.deepEqual(
      answer.content.map((block) => block.text),
      ["Hello there"],
    );
  });

  test("stream", async () => {
    const stream = client.messages.stream(HELLO);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    assert.equal(await stream.finalText(), "Hello there");
    assert.equal(text, "Hello there");
  });

  for (const stream of [false, true]) {
    test(`tools[stream: ${stream}]`, async () => {
      const tool = betaZodTool({ ...WEATHER, inputSchema: City, run: weather });
      const runner = client.beta.messages.toolRunner({ ...HELLO, tools: [tool], stream });
      const answer = await runner.runUntilDone();
      assert.deepEqual(
        answer.content.map((block) => block.text),
        [ANSWER],
      );
    });
  }

  test("typed_answers", async () => {
    const answer = await client.messages.parse({
      ...HELLO,
      output_config: { format: zodOutputFormat(Person) },
    });
    Person.parse(answer.parsed_output);
  });

  test("errors", async () => {
    await assert.rejects(client.messages.create({ ...HELLO, model: "nothing" }), Anthropic.NotFoundError);
    const messages = [{ role: "user", content: TOO_LONG }];
    await assert.rejects(client.messages.create({ ...HELLO, messages }), Anthropic.BadRequestError);
  });

  test("aborts", () =>
    server.aborts(async () => {
      const messages = [{ role: "user", content: LONG }];
      const stream = client.messages.stream({ ...HELLO, max_tokens: 30_000, messages });
      stream.on("text", () => stream.abort());
      await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
    }));
});
