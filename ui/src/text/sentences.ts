// Whole sentences out of a text that grows, for screen readers.

const END = /[.!?…。！？]["'”’)\]]*(?=\s)\s*|\n+/g;
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
    this.#rest = this.#rest.slice(start);
    if (this.#rest.length > MAX_CHARS) {
      add(found, this.#rest);
      this.#rest = "";
    }
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

function add(found: string[], sentence: string): void {
  const trimmed = sentence.trim();
  if (trimmed) found.push(trimmed.slice(0, MAX_CHARS));
}
