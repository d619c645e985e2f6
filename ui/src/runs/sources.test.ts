import { expect, it } from "vitest";
import { opened, openFile, showSession } from "./sources";
import text from "./tree_of_thought.jsonl?raw";

/** A file whose bytes come when the test wants it. */
function slowFile(): { file: File; arrive: () => void } {
  const file = new File([text], "slow.jsonl");
  let arrive = (): void => {};
  const bytes = new Promise<ArrayBuffer>((resolve) => (arrive = () => void file.arrayBuffer().then(resolve)));
  Object.defineProperty(file, "slice", { value: () => ({ arrayBuffer: () => bytes }) });
  return { file, arrive };
}

it("f37: a file that is read no further never replaces what is shown", async () => {
  for (const showOther of [() => openFile(new File([text], "other.jsonl")), async () => showSession()]) {
    const { file, arrive } = slowFile();
    const reading = openFile(file);
    expect(opened.value).toMatchObject({ kind: "reading", name: "slow.jsonl" });
    await showOther();
    const now = opened.value;
    expect(now.kind).not.toBe("reading");
    arrive();
    await reading;
    expect(opened.value).toBe(now);
  }
});
