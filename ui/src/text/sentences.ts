// Whole sentences out of a text that grows, for screen readers.

// Chinese and Japanese have no spaces between sentences.
const END = /[.!?…]["'”’)\]]*(?=\s)\s*|[。！？]["'”’)\]」』）]*\s*|\n+/g;
const MAX_CHARS = 400;

export class SentenceReader {
  #rest = "";

  /** The sentences that `added` completes. */
  push(added: string): string[] {
    this.#rest += added;
    const found: string[] = [];
    let start = 0;
    for (const match of this.#rest.matchAll(END)) {
      const end = match.index + match[0].length;
      add(found, this.#rest.slice(start, end));
      start = end;
    }
    this.#rest = addParts(found, this.#rest.slice(start));
    return found;
  }

  /** What is left at the end of the text. */
  finish(): string[] {
    const found: string[] = [];
    add(found, this.#rest);
    this.#rest = "";
    return found;
  }
}

/** Of anything that can be said. Lines of punctuation are markup, such as fences of code and rules of tables. */
const SAID = /[\p{L}\p{N}\p{So}]/u;

function add(found: string[], sentence: string): void {
  const rest = addParts(found, sentence.trim()).trim();
  if (SAID.test(rest)) found.push(rest);
}

/** Adds what is too much for one part, between two words where it can. Returns the rest. */
function addParts(found: string[], text: string): string {
  let rest = text;
  while (rest.length > MAX_CHARS) {
    const space = rest.lastIndexOf(" ", MAX_CHARS);
    const isPair = (rest.codePointAt(MAX_CHARS - 1) ?? 0) > 0xffff;
    const end = space > 0 ? space : isPair ? MAX_CHARS - 1 : MAX_CHARS;
    const part = rest.slice(0, end).trim();
    if (part) found.push(part);
    rest = rest.slice(end).trimStart();
  }
  return rest;
}
