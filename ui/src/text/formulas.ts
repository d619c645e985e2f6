// Formulas of TeX in the text of a model, drawn as MathML. The library that reads them is loaded when the first one is
// shown. A formula that cannot be drawn stays as its source: it is incomplete, invalid, too large, or would link, load
// or define something.

/** Of the formulas of one text, those that come later stay as their source. */
const MAX_DRAW_MS = 300;
/** A text that streams is rendered again and again. */
const MAX_KEPT = 500;
/** Fractions, roots and scripts in each other take time to lay out. */
const MAX_DEPTH = 20;
const MAX_ELEMENTS = 3000;
const MAX_EXPANSIONS = 500;
const MAX_SIZE: [em: number, pt: number] = [20, 200];
const MATHML = "http://www.w3.org/1998/Math/MathML";
/** A definition could make a short formula large. */
const DEFINES = /\\(?:[egx]?def|(?:future)?let|global|long|(?:new|renew|provide)command|newextarrow)(?![A-Za-z])/;
/** The library draws the arguments of these more than once, so each of them within another doubles the work. */
const DOUBLES = /\\(?:(?:math)?llap|cancelto|equilibrium)/g;
const MAX_DOUBLED = 3;

const TAGS = new Set([
  ...["math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "mfrac", "msqrt", "mroot", "mstyle", "merror", "mpadded"],
  ...["mphantom", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none"],
  ...["mtable", "mtr", "mtd", "menclose"],
]);
const ATTRIBUTES = new Set([
  ...["display", "displaystyle", "scriptlevel", "mathvariant", "mathcolor", "mathbackground", "mathsize", "dir"],
  ...["form", "fence", "separator", "stretchy", "symmetric", "largeop", "movablelimits", "accent", "accentunder"],
  ...["lspace", "rspace", "minsize", "maxsize", "linethickness", "width", "height", "depth", "voffset", "notation"],
  ...["columnalign", "columnspacing", "columnlines", "rowspacing", "rowlines", "columnspan", "rowspan"],
]);

/** A node of the tree that the library makes. */
interface TreeNode {
  readonly type?: string;
  readonly text?: string;
  readonly attributes?: Readonly<Record<string, string>>;
  readonly classes?: readonly string[];
  readonly style?: Readonly<Record<string, string>>;
  readonly children?: readonly TreeNode[];
}

type Temml = typeof import("temml").default;

interface Pen {
  readonly temml: Temml;
  readonly sizes: ResizeObserver;
}

let pen: Pen | undefined;
/** By their sources; null for those that cannot be drawn. */
const drawn = new Map<string, Element | null>();

/** Replaces the sources of formulas in `root`, which the markdown marks, as soon as the library is loaded. */
export function showFormulas(root: ParentNode): void {
  const sources = [...root.querySelectorAll<HTMLElement>("code[data-formula]")];
  if (!sources.length) return;
  if (pen) draw(sources, pen);
  else void load().then((loaded) => draw(sources, loaded), () => undefined); // the server is away
}

async function load(): Promise<Pen> {
  const { default: temml } = await import("temml");
  if (!pen) document.addEventListener("copy", copySources);
  return (pen ??= { temml, sizes: new ResizeObserver(makeReachable) });
}

function draw(sources: readonly HTMLElement[], { temml, sizes }: Pen): void {
  const endMs = performance.now() + MAX_DRAW_MS;
  for (const source of sources) {
    const formula = formulaOf(source.textContent, temml, endMs);
    if (!formula) continue;
    (source.closest("pre") ?? source).replaceWith(formula);
    sizes.observe(formula);
  }
}

function formulaOf(source: string, temml: Temml, endMs: number): Element | null {
  let made = drawn.get(source);
  if (made === undefined) {
    if (performance.now() > endMs) return null;
    made = makeFormula(source, temml);
    if (drawn.size >= MAX_KEPT) drawn.delete(drawn.keys().next().value!);
    drawn.set(source, made);
  }
  return made && (made.cloneNode(true) as Element);
}

/** `source`: with its delimiters. */
function makeFormula(source: string, temml: Temml): Element | null {
  const { tex, isDisplay } = texOf(source);
  if (!isDrawable(tex)) return null;
  let formula: Node;
  try {
    const tree = temml.__renderToMathMLTree(tex, {
      displayMode: isDisplay,
      wrap: "none",
      throwOnError: true,
      maxExpand: MAX_EXPANSIONS,
      maxSize: MAX_SIZE,
      trust: ({ command }: { command: string }) => {
        throw new Error(`${command} is not drawn`);
      },
    }) as TreeNode;
    formula = nodeOf(tree, { room: MAX_ELEMENTS });
  } catch {
    return null;
  }
  const line = document.createElement("span");
  line.append(formula);
  const frame = document.createElement("span");
  frame.className = isDisplay ? "formula is-display" : "formula";
  frame.dir = "ltr";
  frame.dataset["source"] = source;
  frame.append(line);
  return frame;
}

/** Made here, as the page's security policy allows no attributes with styles, and nothing but MathML is wanted. */
function nodeOf(tree: TreeNode, budget: { room: number }): Node {
  const { type = "", text, attributes = {}, classes = [], style = {}, children = [] } = tree;
  if (text !== undefined) return document.createTextNode(text);
  if (budget.room-- <= 0) throw new RangeError("it has too many elements");
  const node = TAGS.has(type) ? document.createElementNS(MATHML, type) : document.createDocumentFragment();
  if (node instanceof MathMLElement) {
    for (const [name, value] of Object.entries(attributes)) {
      if (ATTRIBUTES.has(name)) node.setAttribute(name, value);
      else if (name === "style") node.style.cssText = value;
    }
    if (classes.length) node.setAttribute("class", classes.join(" "));
    Object.assign(node.style, style);
  }
  node.append(...children.map((child) => nodeOf(child, budget)));
  return node;
}

/** What stands between the delimiters. */
export function texOf(source: string): { tex: string; isDisplay: boolean } {
  const isDisplay = /^(?:\\\[|\$\$)/.test(source);
  const length = isDisplay || source.startsWith("\\(") ? 2 : 1;
  return { tex: source.slice(length, -length), isDisplay };
}

/** Whether it defines nothing, and takes a bounded time to draw. */
export function isDrawable(tex: string): boolean {
  let depth = 0;
  for (const [bracket] of tex.matchAll(/\\?[{}]|\\(?:left|right|begin|end)(?![a-z])/gi)) {
    if (bracket === "{" || bracket === "\\left" || bracket === "\\begin") depth++;
    else if (bracket === "}" || bracket === "\\right" || bracket === "\\end") depth--;
    if (depth > MAX_DEPTH) return false;
  }
  return !DEFINES.test(tex) && (tex.match(DOUBLES)?.length ?? 0) <= MAX_DOUBLED;
}

/** A formula that is wider than its text scrolls, also with the keyboard. */
function makeReachable(entries: readonly ResizeObserverEntry[]): void {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0");
    else target.removeAttribute("tabindex");
  }
}

/** A selection with formulas is copied with their sources. */
function copySources(event: ClipboardEvent): void {
  const selection = getSelection();
  if (!event.clipboardData || !selection || selection.isCollapsed) return;
  const copy = document.createElement("div");
  copy.append(selection.getRangeAt(0).cloneContents());
  const formulas = copy.querySelectorAll<HTMLElement>(".formula");
  if (!formulas.length) return;
  for (const formula of formulas) {
    formula.textContent = formula.dataset["source"]!;
    formula.style.whiteSpace = "pre-wrap";
  }
  copy.className = "copied";
  document.body.append(copy); // only text with a layout has the ends of its lines
  event.clipboardData.setData("text/plain", copy.innerText);
  event.clipboardData.setData("text/html", copy.innerHTML);
  copy.remove();
  event.preventDefault();
}
