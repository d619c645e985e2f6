// JSON that is still growing, read as far as it goes.

export type JsonNode =
  | { kind: "object"; members: { name: string; value: JsonNode | null }[]; isDone: boolean; isCut?: boolean }
  | { kind: "array"; items: JsonNode[]; isDone: boolean; isCut?: boolean }
  | { kind: "string"; text: string; isDone: boolean }
  | { kind: "number" | "boolean" | "null"; text: string; isDone: boolean };

const MAX_DEPTH = 100;
/** A page with many more would not answer while they grow. */
export const MAX_VALUES = 2000;

/**
 * The value that `text` begins, or null where nothing of it is there yet or it is no JSON. Has at most `MAX_VALUES`
 * values: `isCut` where the next one would stand.
 */
export function readPartial(text: string): JsonNode | null {
  return new Reader(text).value(0);
}

class Reader {
  #at = 0;
  #left = MAX_VALUES;

  constructor(private readonly text: string) {}

  value(depth: number): JsonNode | null {
    this.#space();
    const char = this.text[this.#at];
    if (char === undefined || depth > MAX_DEPTH || --this.#left < 0) return null;
    if (char === "{") return this.#object(depth);
    if (char === "[") return this.#array(depth);
    if (char === '"') return this.#string();
    const found = /^(?:-?[0-9.eE+-]+|-|[a-z]+)/.exec(this.text.slice(this.#at, this.#at + 400));
    if (!found) return null;
    this.#at += found[0].length;
    const kind = /^[tf]/.test(found[0]) ? "boolean" : found[0].startsWith("n") ? "null" : "number";
    const isDone = kind === "number" ? this.#at < this.text.length : ["true", "false", "null"].includes(found[0]);
    return { kind, text: found[0], isDone };
  }

  #object(depth: number): JsonNode {
    const node: JsonNode = { kind: "object", members: [], isDone: false };
    this.#at++;
    for (;;) {
      this.#space();
      const char = this.text[this.#at];
      if (char === ",") this.#at++;
      else if (char === "}") {
        this.#at++;
        node.isDone = true;
        return node;
      } else if (char === '"') {
        const name = this.#string();
        if (!name.isDone) return node;
        const member: { name: string; value: JsonNode | null } = { name: name.text, value: null };
        node.members.push(member);
        this.#space();
        if (this.text[this.#at] !== ":") return node;
        this.#at++;
        member.value = this.value(depth + 1);
        if (this.#left < 0 && !member.value) node.isCut = true;
        if (!member.value?.isDone) return node;
      } else return node;
    }
  }

  #array(depth: number): JsonNode {
    const node: JsonNode = { kind: "array", items: [], isDone: false };
    this.#at++;
    for (;;) {
      this.#space();
      const char = this.text[this.#at];
      if (char === ",") this.#at++;
      else if (char === "]") {
        this.#at++;
        node.isDone = true;
        return node;
      } else {
        const item = this.value(depth + 1);
        if (!item) return this.#left < 0 ? { ...node, isCut: true } : node;
        node.items.push(item);
        if (!item.isDone) return node;
      }
    }
  }

  #string(): { kind: "string"; text: string; isDone: boolean } {
    const start = ++this.#at;
    while (this.#at < this.text.length && this.text[this.#at] !== '"') this.#at += this.text[this.#at] === "\\" ? 2 : 1;
    const isDone = this.#at < this.text.length;
    const raw = this.text.slice(start, this.#at);
    this.#at++;
    return { kind: "string", text: unescaped(raw), isDone };
  }

  #space(): void {
    while (/[ \n\r\t]/.test(this.text[this.#at] ?? "")) this.#at++;
  }
}

/** Without an escape that is cut off at the end. */
function unescaped(raw: string): string {
  const whole = raw.replace(/(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$/, "$1");
  try {
    return JSON.parse(`"${whole.replace(/[\u0000-\u001f]/g, " ")}"`) as string;
  } catch {
    return whole;
  }
}
