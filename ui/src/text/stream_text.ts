// Text that grows in the document: pieces are added to text nodes, and nothing that stands there is made anew.
//
// It stands in blocks, which end at a line's end once they are long, so that the browser lays out the last one
// only and skips those outside the window. The text is content, never markup.

const BLOCK_CHARS = 2048;
/** A line without an end is divided here all the same. */
const MAX_BLOCK_CHARS = 8192;

export class StreamText {
  #last: Text | null = null;

  constructor(private readonly host: HTMLElement) {}

  append(added: string): void {
    let rest = added;
    while (rest) {
      const last = this.#last ?? this.#begin();
      const cut = cutOf(last.length, rest);
      if (cut === null) {
        last.appendData(rest);
        return;
      }
      if (cut) last.appendData(rest.slice(0, cut));
      rest = rest.slice(cut);
      this.#last = null;
    }
  }

  /** Shows `text` in place of what is there, with marks around the spans `[start, end]` (UTF-16, ascending). */
  mark(text: string, spans: readonly (readonly [number, number])[], className: string, title: string): void {
    this.clear();
    const block = this.host.appendChild(blockElement());
    let end = 0;
    for (const [start, stop] of spans) {
      if (start > end) block.append(text.slice(end, start));
      const mark = document.createElement("mark");
      mark.className = className;
      mark.title = title;
      mark.textContent = text.slice(start, stop);
      block.append(mark);
      end = stop;
    }
    block.append(text.slice(end));
  }

  clear(): void {
    this.host.replaceChildren();
    this.#last = null;
  }

  #begin(): Text {
    const node = document.createTextNode("");
    const block = blockElement();
    block.append(node);
    this.host.append(block);
    this.#last = node;
    return node;
  }
}

function blockElement(): HTMLDivElement {
  const block = document.createElement("div");
  block.className = "text-block";
  block.dir = "auto";
  return block;
}

/** Where a block of `length` characters ends within `added`, or null if it does not. */
export function cutOf(length: number, added: string): number | null {
  if (length + added.length <= BLOCK_CHARS) return null;
  const newline = added.indexOf("\n", Math.max(0, BLOCK_CHARS - length));
  const cut = newline < 0 ? added.length : newline + 1;
  const room = Math.max(0, MAX_BLOCK_CHARS - length);
  if (cut <= room) return newline < 0 ? null : cut;
  const unit = added.charCodeAt(room - 1);
  return unit >= 0xd800 && unit < 0xdc00 ? room - 1 : room; // a pair stays whole
}
