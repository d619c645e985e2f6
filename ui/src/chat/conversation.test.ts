import { image } from "agentflow-client";
import { expect, test } from "vitest";
import { added, changed, declined, EMPTY, fromPlain, imagesTo, messagesTo, openCalls, pathOf, siblingsOf, switched, toPlain } from "./conversation";

const texts = (conversation: typeof EMPTY) => pathOf(conversation).map((turn) => turn.content);
const talk = () => {
  let made = added(EMPTY, 0, { role: "user", content: "a" });
  made = added(made, 1, { role: "assistant", content: "b" });
  return added(made, 2, { role: "user", content: "c" });
};

test("turns follow each other", () => {
  expect(texts(talk())).toEqual(["a", "b", "c"]);
  expect(messagesTo(talk(), 3, "Be kind.").map(({ role, content }) => `${role} ${content}`)).toEqual([
    "system Be kind.",
    "user a",
    "assistant b",
    "user c",
  ]);
});

test("images stand before the text of their turn", async () => {
  const dot = await image(Uint8Array.of(0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a));
  const images = [{ source: dot.source, name: "dot", width: 1, height: 1, thumbnail: "" }];
  let made = added(EMPTY, 0, { role: "user", content: "See.", images });
  made = added(made, 1, { role: "assistant", content: "b" });
  made = added(made, 2, { role: "user", content: "", images });
  const imageOf = (source: string) => (source === dot.source ? dot : undefined);
  expect(messagesTo(made, 3, "", imageOf).map(({ content }) => content)).toEqual([[dot, "See."], "b", [dot]]);
  expect(imagesTo(made, 2)).toEqual(images);
  expect(fromPlain(JSON.parse(JSON.stringify(toPlain(made))))).toEqual(made);
});

test("an edited turn is a branch; each branch keeps what follows it", () => {
  const edited = added(talk(), 0, { role: "user", content: "A" });
  expect(texts(edited)).toEqual(["A"]);
  const answered = added(edited, 4, { role: "assistant", content: "B" });
  expect(texts(switched(answered, 1))).toEqual(["a", "b", "c"]);
  expect(texts(switched(switched(answered, 1), 4))).toEqual(["A", "B"]);
  expect(siblingsOf(answered, answered.turns.get(4)!)).toEqual([1, 4]);
  expect(messagesTo(answered, 5).map((message) => message.content)).toEqual(["A", "B"]);
});

test("a conversation survives JSON", () => {
  const edited = added(talk(), 0, { role: "user", content: "A" });
  const again = (made: typeof EMPTY) => fromPlain(JSON.parse(JSON.stringify(toPlain(made))));
  expect(again(edited)).toEqual(edited);
  expect(again(EMPTY)).toBe(EMPTY);
});

test("a reply grows without a new branch", () => {
  const grown = changed(talk(), 2, { content: "b!" });
  expect(texts(grown)).toEqual(["a", "b!", "c"]);
  expect(texts(talk())).toEqual(["a", "b", "c"]);
});

test("calls are open until a tool's turn has answered them", () => {
  const calls = [
    { id: "1", name: "clock", arguments: "{}" },
    { id: "2", name: "clock", arguments: "{}" },
  ];
  let made = added(EMPTY, 0, { role: "user", content: "When?" });
  made = added(made, 1, { role: "assistant", content: "", toolCalls: calls });
  expect(openCalls(made, made.turns.get(2)!).map((call) => call.id)).toEqual(["1", "2"]);
  made = added(made, 2, { role: "tool", content: "noon", call: { id: "2", name: "clock" } });
  expect(openCalls(made, made.turns.get(2)!).map((call) => call.id)).toEqual(["1"]);
  expect(messagesTo(made, 3).at(-1)).toMatchObject({ role: "tool", tool_call_id: "2" });
});

test("a message after open calls declines them, and only them", () => {
  const calls = ["1", "2", "3"].map((id) => ({ id, name: "clock", arguments: "{}" }));
  let made = added(EMPTY, 0, { role: "user", content: "When?" });
  made = added(made, 1, { role: "assistant", content: "", toolCalls: calls });
  const answered = added(made, 2, { role: "tool", content: "noon", call: { id: "2", name: "clock" } });
  const [settled, last] = declined(answered, 3, "no");
  expect(openCalls(settled, settled.turns.get(2)!)).toEqual([]);
  expect(messagesTo(settled, last).map(({ tool_call_id: id, content }) => [id, content]).slice(2)).toEqual([
    ["2", "noon"],
    ["1", "no"],
    ["3", "no"],
  ]);
  expect(declined(settled, last, "no")).toEqual([settled, last]);
  expect(declined(made, 1, "no")).toEqual([made, 1]);
  // An edited message goes beside the first one: the calls below that are not its own.
  expect(declined(made, 0, "no")).toEqual([made, 0]);
});
