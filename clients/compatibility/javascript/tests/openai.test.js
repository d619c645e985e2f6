// The client of OpenAI: Chat Completions and Responses.

import assert from "node:assert/strict";
import { after, before, suite, test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import {
  ANSWER,
  LONG,
  MODEL,
  Person,
  startServer,
  TOO_LONG,
  WEATHER,
  WEATHER_SCHEMA,
  weather,
} from "../server.js";

const HELLO = [{ role: "user", content: "Hello there" }];

suite("openai", { timeout: 120_000 }, () => {
  let server, client;

  before(async () => {
    server = await startServer();
    client = new OpenAI({ baseURL: server.v1, apiKey: "no-key", maxRetries: 0 });
  });

  after(() => server.close());

  test("chat[completions]", async () => {
    const answer = await client.chat.completions.create({ model: MODEL, messages: HELLO });
    assert.equal(answer.choices[0].message.content, "Hello there");
  });

  test("chat[responses]", async () => {
    const answer = await client.responses.create({ model: MODEL, input: "Hello there" });
    assert.equal(answer.output_text, "Hello there");
  });

  test("stream[completions]", async () => {
    const stream = client.chat.completions.stream({ model: MODEL, messages: HELLO });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, "Hello there");
    assert.equal(await stream.finalContent(), "Hello there");
  });

  test("stream[responses]", async () => {
    const stream = client.responses.stream({ model: MODEL, input: "Hello there" });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, "Hello there");
    assert.equal((await stream.finalResponse()).output_text, "Hello there");
  });

  for (const stream of [false, true]) {
    test(`tools[completions, stream: ${stream}]`, async () => {
      const parse = JSON.parse;
      const tool = { ...WEATHER, parameters: WEATHER_SCHEMA, parse, function: weather };
      const runner = client.chat.completions.runTools({
        model: MODEL,
        messages: HELLO,
        tools: [{ type: "function", function: tool }],
        stream,
      });
      assert.equal(await runner.finalContent(), ANSWER);
    });
  }

  test("tools[responses]", async () => {
    const tools = [{ type: "function", strict: true, ...WEATHER, parameters: WEATHER_SCHEMA }];
    const first = await client.responses.create({ model: MODEL, input: "Hello there", tools });
    const [call] = first.output.filter((item) => item.type === "function_call");
    const output = weather(JSON.parse(call.arguments));
    const second = await client.responses.create({
      model: MODEL,
      previous_response_id: first.id,
      input: [{ type: "function_call_output", call_id: call.call_id, output }],
      tools,
    });
    assert.equal(second.output_text, ANSWER);
  });

  test("typed_answers[completions]", async () => {
    const format = zodResponseFormat(Person, "person");
    const answer = await client.chat.completions.parse({
      model: MODEL,
      messages: HELLO,
      response_format: format,
    });
    Person.parse(answer.choices[0].message.parsed);
  });

  test("typed_answers[responses]", async () => {
    const format = zodTextFormat(Person, "person");
    const answer = await client.responses.parse({ model: MODEL, input: "Hello there", text: { format } });
    Person.parse(answer.output_parsed);
  });

  test("errors", async () => {
    const create = (model, content) =>
      client.chat.completions.create({ model, messages: [{ role: "user", content }] });
    await assert.rejects(create("nothing", "Hello there"), OpenAI.NotFoundError);
    await assert.rejects(
      create(MODEL, TOO_LONG),
      (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
    );
  });

  test("aborts[completions]", () =>
    server.aborts(async () => {
      const messages = [{ role: "user", content: LONG }];
      const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true });
      for await (const _ of stream) break;
    }));

  test("aborts[responses]", () =>
    server.aborts(async () => {
      const stream = client.responses.stream({ model: MODEL, input: LONG, store: false });
      stream.on("response.output_text.delta", () => stream.abort());
      await assert.rejects(stream.done(), OpenAI.APIUserAbortError);
    }));
});
