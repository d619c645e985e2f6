// Draws the tree on a canvas: the blocks that are in view, their sizes, and the axis of tokens.

import { count } from "../charts/numbers";
import { ticksBetween } from "../charts/ticks";
import { shortened } from "../text/shorten";
import type { Block, Scale, TreeLayout } from "./layout";
import { drawBlock, type Box, type Look, type Palette } from "./palette";
import { GHOST_S, HIT_S, type PrefixNode } from "./prefixes";
import type { View } from "./view";

/** The height of the axis above the blocks, in pixels. */
export const AXIS = 24;
const MIN_LABEL_HEIGHT = 13;
const CHARACTER = 6.4; // of the label's font, in pixels

export interface Picture {
  readonly layout: TreeLayout;
  readonly view: View;
  readonly scale: Scale;
  readonly width: number;
  readonly height: number;
  readonly nowS: number;
  /** Whether passing states fade; else they are drawn at full strength until they end. */
  readonly fades: boolean;
  readonly focused: number | null;
  readonly hovered: number | null;
  readonly texts: ReadonlyMap<number, string>;
}

export function draw(context: CanvasRenderingContext2D, palette: Palette, picture: Picture): void {
  const { width, height, layout, view } = picture;
  context.clearRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const block of layout.blocks) {
    const box = boxOf(block, view);
    if (box.x > width || box.x + box.width < 0 || box.y > height || box.y + box.height < AXIS) continue;
    drawNode(context, palette, picture, block, box);
  }
  for (const [id, line] of [
    [picture.hovered, 1.5],
    [picture.focused, 3],
  ] as const) {
    const block = id === null ? undefined : layout.byId.get(id);
    if (block !== undefined) outline(context, palette, outlined(boxOf(block, view), line, picture), line);
  }
  context.restore();
  if (picture.scale === "tokens") drawAxis(context, palette, picture);
  drawThumbs(context, palette, picture);
}

/** Bars at the right and lower edge, as of a scroll bar, where more of the tree lies outside of the picture. */
function drawThumbs(context: CanvasRenderingContext2D, palette: Palette, picture: Picture): void {
  const { layout, view, width, height } = picture;
  const [shownX, shownY] = [
    width / view.perToken / layout.width,
    (height - AXIS) / view.perRow / layout.rows,
  ];
  context.fillStyle = palette.inkSoft;
  context.globalAlpha = 0.7;
  if (shownY < 0.999) {
    const room = height - AXIS - 4;
    const length = Math.max(24, room * shownY);
    const at = view.top / Math.max(layout.rows * (1 - shownY), 1e-9);
    context.fillRect(width - 4, AXIS + (room - length) * Math.min(at, 1), 4, length);
  }
  if (shownX < 0.999) {
    const length = Math.max(24, (width - 8) * shownX);
    const at = view.left / Math.max(layout.width * (1 - shownX), 1e-9);
    context.fillRect((width - 8 - length) * Math.min(at, 1), height - 4, length, 4);
  }
  context.globalAlpha = 1;
}

/** How a node looks now. Without `fades` a passing state keeps its full strength until it ends. */
export function lookOf(node: PrefixNode, nowS: number, fades: boolean): Look {
  const left = (sinceS: number | null, forS: number): number => {
    const share = sinceS === null ? 0 : Math.max(0, 1 - (nowS - sinceS) / forS);
    return fades || share === 0 ? share : 1;
  };
  return {
    isInUse: node.locks > 0,
    hit: left(node.hitS, HIT_S),
    ghost: node.goneS === null ? null : left(node.goneS, GHOST_S),
    generated: node.numTokens > 0 ? node.numGenerated / node.numTokens : 0,
  };
}

function boxOf(block: Block, view: View): Box {
  const gapX = Math.min(1, block.width * view.perToken * 0.2);
  const gapY = Math.min(2, view.perRow * 0.15);
  return {
    x: (block.x - view.left) * view.perToken,
    y: AXIS + (block.y - view.top) * view.perRow,
    width: Math.max(block.width * view.perToken - gapX, 0.75),
    height: Math.max(block.rows * view.perRow - gapY, 0.75),
  };
}

function drawNode(
  context: CanvasRenderingContext2D,
  palette: Palette,
  picture: Picture,
  block: Block,
  box: Box,
): void {
  const { node } = block;
  const look = lookOf(node, picture.nowS, picture.fades);
  drawBlock(context, palette, look, box, picture);
  const from = Math.max(box.x, 0);
  const room = Math.min(box.x + box.width, picture.width) - from - 10;
  const text = picture.texts.get(node.id);
  const label = text === undefined ? count(node.numTokens) : `${count(node.numTokens)} · ${text}`;
  const fitting = Math.floor(room / CHARACTER);
  if (box.height < MIN_LABEL_HEIGHT || fitting < count(node.numTokens).length) return;
  const top = Math.max(box.y, AXIS);
  const bottom = Math.min(box.y + box.height, picture.height);
  if (bottom - top < MIN_LABEL_HEIGHT) return;
  context.fillStyle = look.isInUse ? palette.inUseInk : palette.ink;
  if (look.ghost !== null) context.globalAlpha = look.ghost;
  context.fillText(shortened(label, Math.max(2, fitting)), from + 5, (top + bottom) / 2);
  context.globalAlpha = 1;
}

/** The middle of the line around a box. Where the box ends at an edge of the picture, the line is inside the box, as the
 * picture is cut there; beyond the edge it stays outside of it. */
export function outlined(
  box: Box,
  line: number,
  { width, height }: { readonly width: number; readonly height: number },
): Box {
  const half = line / 2;
  const start = (at: number, edge: number): number => (at < edge - 1 ? at - half : Math.max(at - half, edge + half));
  const end = (at: number, edge: number): number => (at > edge + 1 ? at + half : Math.min(at + half, edge - half));
  const [x, y] = [start(box.x, 0), start(box.y, AXIS)];
  return {
    x,
    y,
    width: end(box.x + Math.max(box.width, 2), width) - x,
    height: end(box.y + box.height, height) - y,
  };
}

function outline(context: CanvasRenderingContext2D, palette: Palette, box: Box, line: number): void {
  context.beginPath();
  context.roundRect(box.x, box.y, box.width, box.height, 4);
  context.strokeStyle = palette.focus;
  context.lineWidth = line;
  context.stroke();
}

function drawAxis(
  context: CanvasRenderingContext2D,
  palette: Palette,
  { view, width, layout }: Picture,
): void {
  const to = Math.min(layout.width, view.left + width / view.perToken);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.fillStyle = palette.inkSoft;
  context.strokeStyle = palette.line;
  context.lineWidth = 1;
  context.beginPath();
  const marks = ticksBetween(view.left, to, Math.max(2, Math.floor(width / 110)));
  for (const value of marks.filter(Number.isInteger)) {
    const x = Math.round((value - view.left) * view.perToken) + 0.5;
    context.moveTo(x, AXIS - 6);
    context.lineTo(x, AXIS - 1);
    const label = value === 0 ? "token 0" : count(value);
    const size = context.measureText(label).width;
    context.fillText(label, Math.max(0, Math.min(x - (value === 0 ? 0 : size / 2), width - size)), AXIS - 9);
  }
  context.stroke();
}
