// Markdown of a model, as sanitised HTML: no scripts, styles, images, forms, ids or handlers, and links only to
// the web. The page's security policy forbids the same once more. HTML in the markdown is shown as text, so that
// the sanitiser parses nothing that the policy would stop, with a message in the console.
import DOMPurify from "dompurify";
import { Lexer, Marked, type Token, type TokenizerAndRendererExtension, type Tokens, type TokensList } from "marked";
import { copyText } from "./copy";
import { showFormulas } from "./formulas";

/** Tags without attributes that models use where markdown has nothing. */
const NOT_PLAIN = /<(?!\/?(?:br|sub|sup) *\/?>)/gi;

const escaped = (text: string): string => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/** Formulas of TeX, in which markdown would find emphasis and escapes. In "$5 and $10" is none. */
const FORMULA =
  /^(?:\\\(.{1,2000}?\\\)|\\\[[^]{1,2000}?\\\]|\$\$[^]{1,2000}?\$\$|\$(?!\s)(?:\\.|[^$\\\n]){1,400}(?<!\s)\$(?!\w))/;
/** One that the end of the text breaks off. */
const OPEN_FORMULA = /^(?:\\\(.*|(?:\\\[|\$\$)(?:[^\n]|\n(?!\s*\n))*)$/;
const MAX_OPEN_CHARS = 2000;
/** "$5 or 10$": an amount and a word. */
const PRICES = /^\$\d[^\\$]*\s[a-z]{2,}\s/i;

const FORMULAS: TokenizerAndRendererExtension[] = [
  {
    name: "displayed formula",
    level: "block",
    start(source) {
      const end = source.indexOf("\n\n"); // of the paragraph, which the formula ends
      const paragraph = source.slice(0, end < 0 ? undefined : end);
      if (paragraph.length > MAX_RUN_CHARS) return undefined;
      for (const { index } of paragraph.matchAll(/\n(?= {0,3}(?:\\\[|\$\$))/g)) {
        if (displayedIn(this.lexer, source.slice(index + 1))) return index;
      }
      return undefined;
    },
    tokenizer(source) {
      return displayedIn(this.lexer, source);
    },
    renderer: ({ text, isWhole }) => `<pre>${sourceOf(text, isWhole)}</pre>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (source) => source.match(/\\[([]|\$/)?.index,
    tokenizer(source, tokens) {
      const isDollar = source.startsWith("$");
      if (isDollar && /\w/.test(tokens.at(-1)?.raw.at(-1) ?? "")) return undefined; // 5$ and 10$
      const raw = FORMULA.exec(source)?.[0];
      if (raw !== undefined && PRICES.test(raw)) return undefined;
      if (raw !== undefined) return { type: "formula", raw, isWhole: true };
      return !isDollar && isOpen(this.lexer, source) ? { type: "formula", raw: source, isWhole: false } : undefined;
    },
    renderer: ({ raw, isWhole }) => sourceOf(raw, isWhole),
  },
];

/** The displayed formula with which the source begins, alone on its lines. */
function displayedIn(lexer: Lexer, source: string): Tokens.Generic | undefined {
  const start = /^ {0,3}(?=\\\[|\$\$)/.exec(source)?.[0].length;
  if (start === undefined) return undefined;
  const rest = source.slice(start);
  const whole = FORMULA.exec(rest)?.[0];
  if (whole === undefined) {
    return isOpen(lexer, rest) ? { type: "displayed formula", raw: source, text: rest, isWhole: false } : undefined;
  }
  if (!/^ *(?:\n|$)/.test(rest.slice(whole.length))) return undefined;
  return { type: "displayed formula", raw: source.slice(0, start + whole.length), text: whole, isWhole: true };
}

const sourceOf = (text: string, isWhole: unknown): string =>
  `<code${isWhole ? ' data-formula=""' : ""}>${escaped(text)}</code>`;

/** Whether the rest of a run of text is an open formula at the end of the text. */
const isOpen = (lexer: Lexer, rest: string): boolean =>
  rest.length <= MAX_OPEN_CHARS && OPEN_FORMULA.test(rest) && (lexer as BoundedLexer).isLast(rest);

const marked = new Marked({
  gfm: true,
  breaks: true,
  async: false,
  extensions: FORMULAS,
  renderer: {
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    /** A link to it: the page loads nothing from elsewhere. */
    image: ({ href, text }) => `<a href="${escaped(href).replaceAll('"', "&quot;")}">${escaped(text) || "image"}</a>`,
    html(token) {
      const text = token.text.trim().replaceAll("&", "&amp;").replace(NOT_PLAIN, "&lt;");
      return "block" in token && token.block ? `<p>${text.replaceAll("\n", "<br>")}</p>` : text;
    },
  },
});

/** The time for a run of text grows with the square of its length. Models that repeat themselves write long ones. */
const MAX_RUN_CHARS = 8000;
const MAX_PARSE_MS = 300;

/** Takes a bounded time: runs of text that are long, or come late, have no emphasis, code and links. */
class BoundedLexer extends Lexer {
  readonly #endMs = performance.now() + MAX_PARSE_MS;
  #text = "";

  override lex(source: string): TokensList {
    this.#text = source.trimEnd();
    return super.lex(source);
  }

  /** Whether the text ends with the last line of `rest`. */
  isLast(rest: string): boolean {
    const text = rest.trimEnd();
    return this.#text.endsWith(text.slice(text.lastIndexOf("\n") + 1));
  }

  override inlineTokens(source: string, tokens: Token[] = []): Token[] {
    if (source.length <= MAX_RUN_CHARS && performance.now() < this.#endMs) return super.inlineTokens(source, tokens);
    for (const [number, line] of source.split("\n").entries()) {
      if (number > 0) tokens.push({ type: "br", raw: "\n" });
      tokens.push({ type: "text", raw: line, text: line, escaped: false });
    }
    return tokens;
  }
}

/** The markdown as HTML that is not sanitised; null for quotes or lists in each other that are too many. */
export function htmlOf(source: string): string | null {
  try {
    return marked.parser(new BoundedLexer({ ...marked.defaults }).lex(source));
  } catch (error) {
    if (error instanceof RangeError) return null; // the stack is full
    throw error;
  }
}

const TAGS = [
  ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code"],
  ...["em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td", "sub", "sup"],
];

let purifier: ReturnType<typeof DOMPurify> | undefined;

function purify(html: string): DocumentFragment {
  if (!purifier) {
    purifier = DOMPurify(window);
    purifier.addHook("afterSanitizeAttributes", (node) => {
      if (node.tagName === "A") {
        node.setAttribute("target", "_blank");
        node.setAttribute("rel", "noopener noreferrer nofollow");
      } else if (/^(P|LI|H\d|TD|TH|BLOCKQUOTE)$/.test(node.tagName)) node.setAttribute("dir", "auto");
      else if (/^(PRE|CODE)$/.test(node.tagName)) node.setAttribute("dir", "ltr");
      if (/^(PRE|TABLE)$/.test(node.tagName)) node.setAttribute("tabindex", "0"); // it may scroll
    });
  }
  return purifier.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start", "align", "data-formula"],
    ADD_URI_SAFE_ATTR: ["start", "align"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

const CODE_BLOCK = "pre:not(:has([data-formula]))";
/** Longer texts are shown as they are. */
const MAX_MARKDOWN_CHARS = 60_000;

/** Shows `source` in `host`. A page has one h1: the model's headings become smaller ones. `hasButtons`: blocks of code
 * can be copied. Formulas stand there as their source until they are drawn. */
export function showMarkdown(host: HTMLElement, source: string, hasButtons: boolean): void {
  const html = source.length <= MAX_MARKDOWN_CHARS ? htmlOf(source) : null;
  host.classList.toggle("is-plain", html === null);
  if (html === null) {
    host.textContent = source;
    return;
  }
  const fragment = purify(html);
  for (const heading of fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const smaller = document.createElement("h3");
    smaller.dir = "auto";
    smaller.append(...heading.childNodes);
    heading.replaceWith(smaller);
  }
  showFormulas(fragment);
  if (hasButtons) for (const block of fragment.querySelectorAll<HTMLPreElement>(CODE_BLOCK)) addCopyButton(block);
  host.replaceChildren(fragment);
}

function addCopyButton(block: HTMLPreElement): void {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small";
  button.textContent = "Copy";
  button.ariaLabel = "Copy this code";
  button.addEventListener("click", () => void copyText(block.textContent.replace(/\n$/, ""), button));
  const frame = document.createElement("div");
  frame.className = "code-block";
  block.replaceWith(frame);
  frame.append(button, block);
}
