// Markdown of a model, as sanitised HTML: no scripts, styles, images, forms, ids or handlers, and links only to
// the web. The page's security policy forbids the same once more. HTML in the markdown is shown as text, so that
// the sanitiser parses nothing that the policy would stop, with a message in the console.
import DOMPurify from "dompurify";
import { Lexer, Marked, type Token } from "marked";

/** Tags without attributes that models use where markdown has nothing. */
const NOT_PLAIN = /<(?!\/?(?:br|sub|sup) *\/?>)/gi;

const marked = new Marked({
  gfm: true,
  breaks: true,
  async: false,
  renderer: {
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
      else if (node.tagName === "PRE") node.setAttribute("dir", "ltr");
      if (/^(PRE|TABLE)$/.test(node.tagName)) node.setAttribute("tabindex", "0"); // it may scroll
    });
  }
  return purifier.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start", "align"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

/** Longer texts are shown as they are. */
const MAX_MARKDOWN_CHARS = 60_000;

/** Shows `source` in `host`. A page has one h1: the model's headings become smaller ones. */
export function showMarkdown(host: HTMLElement, source: string): void {
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
  host.replaceChildren(fragment);
}
