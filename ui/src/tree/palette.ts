// The colours of the picture, from the page's tokens, and how a node of each state is drawn.

export interface Palette {
  readonly ink: string;
  readonly inkSoft: string;
  readonly line: string;
  readonly surface: string;
  readonly focus: string;
  readonly cached: string;
  readonly cachedEdge: string;
  readonly inUse: string;
  readonly inUseInk: string;
  readonly hit: string;
  readonly hitEdge: string;
  readonly evicted: string;
  readonly generated: string;
}

const TOKENS: Readonly<Record<keyof Palette, string>> = {
  ink: "--ink",
  inkSoft: "--ink-soft",
  line: "--line",
  surface: "--surface",
  focus: "--tree-focus",
  cached: "--tree-cached",
  cachedEdge: "--tree-cached-edge",
  inUse: "--tree-in-use",
  inUseInk: "--tree-in-use-ink",
  hit: "--tree-hit",
  hitEdge: "--tree-hit-edge",
  evicted: "--bad",
  generated: "--tree-generated",
};

/** The colours that the tokens have at this element now, as a canvas understands them. */
export function paletteAt(element: Element): Palette {
  const probe = document.createElement("span");
  probe.hidden = true;
  // A canvas keeps its colours where the system forces others: they must fit each other.
  probe.style.setProperty("forced-color-adjust", "none");
  element.append(probe);
  const read = (token: string): string => {
    probe.style.color = `var(${token})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(Object.entries(TOKENS).map(([name, token]) => [name, read(token)]));
  probe.remove();
  return found as unknown as Palette;
}

/** How a block looks. `hit`, `ghost`: how much is left of a hit, and of a node that was evicted, 1 to 0. `generated`:
 * the share of its tokens that were generated. The looks differ by their patterns, not by colour alone. */
export interface Look {
  readonly isInUse: boolean;
  readonly hit: number;
  readonly ghost: number | null;
  readonly generated: number;
}

export interface Box {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

/** Draws a node's block. `shown`: the size of the canvas, beyond which no pattern is drawn. */
export function drawBlock(
  context: CanvasRenderingContext2D,
  palette: Palette,
  { isInUse, hit, ghost, generated }: Look,
  box: Box,
  shown: { readonly width: number; readonly height: number },
): void {
  const { x, y, width, height } = box;
  const radius = Math.min(4, width / 3, height / 3);
  const trace = (): void => {
    context.beginPath();
    if (radius < 1.5) context.rect(x, y, width, height);
    else context.roundRect(x, y, width, height, radius);
  };
  const isLarge = width >= 5 && height >= 5;
  trace();
  if (ghost !== null) {
    context.globalAlpha = ghost;
    context.strokeStyle = palette.evicted;
    context.lineWidth = 1.25;
    context.setLineDash([3, 3]);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
    return;
  }
  context.fillStyle = isInUse ? palette.inUse : palette.cached;
  context.fill();
  if (isLarge && !isInUse) {
    context.strokeStyle = palette.cachedEdge;
    context.lineWidth = 1;
    context.stroke();
  }
  if (hit > 0) {
    context.globalAlpha = hit;
    if (isLarge) stripes(context, palette.hit, box, shown, trace);
    context.beginPath();
    context.roundRect(x + 1, y + 1, Math.max(width - 2, 0.5), Math.max(height - 2, 0.5), radius);
    context.strokeStyle = palette.hitEdge;
    context.lineWidth = 2;
    context.stroke();
    context.globalAlpha = 1;
  }
  if (generated > 0 && height >= 9) {
    context.save();
    trace();
    context.clip();
    context.fillStyle = isInUse ? palette.inUseInk : palette.generated;
    // Generated tokens come after those of the prompt: dots along the bottom of the right end.
    const start = x + width * (1 - generated);
    const end = Math.min(x + width - 3, shown.width);
    for (let at = end; at >= Math.max(start, 0); at -= 4) context.fillRect(at, y + height - 3.5, 2, 2);
    context.restore();
  }
}

function stripes(
  context: CanvasRenderingContext2D,
  colour: string,
  { x, y, width, height }: Box,
  shown: { readonly width: number; readonly height: number },
  trace: () => void,
): void {
  context.save();
  trace();
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 3;
  context.beginPath();
  const [top, bottom] = [Math.max(y, 0), Math.min(y + height, shown.height)];
  const reach = bottom - top;
  const from = Math.max(x - reach, -reach);
  for (let at = from - (from % 9); at < Math.min(x + width, shown.width); at += 9) {
    context.moveTo(at, bottom);
    context.lineTo(at + reach, top);
  }
  context.stroke();
  context.restore();
}
