// The picture of the tree, with pointer and keyboard: move the focus, zoom, pan.
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { announce } from "../app/announce";
import { theme } from "../app/theme";
import { useWidth } from "../charts/useWidth";
import { blockAt, moved, type Move, type Scale, type TreeLayout } from "./layout";
import { paletteAt, type Palette } from "./palette";
import { AXIS, draw } from "./picture";
import type { PrefixTree } from "./prefixes";
import { bounded, fitted, panned, revealed, zoomed, type Extent, type View } from "./view";
import { describeNode } from "./words";

/** What the buttons beside the picture do. */
export interface PictureControls {
  zoom(factor: number): void;
  fit(): void;
}

interface Props {
  readonly tree: PrefixTree;
  readonly layout: TreeLayout;
  readonly scale: Scale;
  readonly nowS: () => number;
  readonly focused: number | null;
  readonly onFocus: (id: number | null) => void;
  readonly hovered: number | null;
  readonly onHover: (id: number | null) => void;
  readonly texts: ReadonlyMap<number, string>;
  readonly controls: RefObject<PictureControls | null>;
  /** Called with the ids of the blocks that have room for text. */
  readonly onRoom: (ids: readonly number[]) => void;
  /** Called when ghosts have ended. */
  readonly onGhostsGone: () => void;
}

const ROW = 34;
const PAN = 60; // pixels
const MIN_TEXT_WIDTH = 90;
const MAX_TEXTS = 40;
/** The time between two pictures while something fades: a large tree takes some milliseconds to draw. */
const FADE_MS = 66;
const MOVES: Readonly<Record<string, Move>> = {
  ArrowLeft: "parent",
  ArrowRight: "child",
  ArrowUp: "previous",
  ArrowDown: "next",
  Home: "first",
  End: "last",
};
const PANS: Readonly<Record<string, readonly [number, number]>> = {
  ArrowLeft: [PAN, 0],
  ArrowRight: [-PAN, 0],
  ArrowUp: [0, PAN],
  ArrowDown: [0, -PAN],
};

export function TreeCanvas(props: Props) {
  const { layout, focused, controls } = props;
  const [frame, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const palette = useRef<Palette | null>(null);
  const [chosen, setChosen] = useState<View | null>(null); // null: everything fits
  const drag = useRef<{ x: number; y: number; isMoved: boolean } | null>(null);
  const height =
    AXIS + Math.round(Math.min(Math.max(layout.rows * ROW, 120), Math.max(240, innerHeight * 0.58)));
  const extent: Extent = {
    width: layout.width,
    rows: layout.rows,
    pixelWidth: width,
    pixelHeight: height - AXIS,
  };
  const view = chosen === null ? fitted(extent) : bounded(chosen, extent);
  const now = { ...props, width, height, extent, view };
  const newest = useRef(now);
  newest.current = now;

  useRedraw(canvas, palette, newest);

  useEffect(() => {
    const ids = layout.blocks.filter((block) => {
      const x = (block.x - view.left) * view.perToken;
      const y = (block.y - view.top) * view.perRow;
      const isWide = block.width * view.perToken >= MIN_TEXT_WIDTH && block.rows * view.perRow >= 13;
      return (
        isWide &&
        x < width &&
        x + block.width * view.perToken > 0 &&
        y < height &&
        y + block.rows * view.perRow > 0
      );
    });
    props.onRoom(ids.slice(0, MAX_TEXTS).map((block) => block.node.id));
  }, [layout, view.left, view.top, view.perToken, view.perRow, width]);

  const zoom = (factor: number, x = width / 2, y = (height - AXIS) / 2): void =>
    setChosen(zoomed(newest.current.view, newest.current.extent, factor, x, y));
  const pan = (dx: number, dy: number): void =>
    setChosen(panned(newest.current.view, newest.current.extent, dx, dy));
  controls.current = { zoom, fit: () => setChosen(null) };

  const focus = (id: number | null, isSaid: boolean): void => {
    props.onFocus(id);
    const block = id === null ? undefined : layout.byId.get(id);
    if (block === undefined) return;
    const shown = revealed(view, extent, block, false);
    if (shown.left !== view.left || shown.top !== view.top) setChosen(shown);
    if (isSaid) announce(`${describeNode(block.node, props.nowS())}.`);
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [move, shift] = [MOVES[event.key], PANS[event.key]];
    if (event.shiftKey && shift !== undefined) pan(...shift);
    else if (move !== undefined) focus(moved(layout, focused, move), true);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") setChosen(null);
    else if (event.key === "Escape") props.onFocus(null);
    else if (event.key === "Enter" || event.key === " ") {
      const block = focused === null ? undefined : layout.byId.get(focused);
      if (block === undefined) return;
      setChosen(revealed(view, extent, block, true));
    } else return;
    event.preventDefault();
  };
  const idAt = (event: PointerEvent | MouseEvent): number | null => {
    const box = canvas.current?.getBoundingClientRect();
    if (box === undefined || event.clientY - box.top < AXIS) return null;
    const x = view.left + (event.clientX - box.left) / view.perToken;
    const y = view.top + (event.clientY - box.top - AXIS) / view.perRow;
    return blockAt(layout, x, y)?.node.id ?? null;
  };
  const onPointerMove = (event: PointerEvent): void => {
    const from = drag.current;
    if (from === null) {
      props.onHover(idAt(event));
      return;
    }
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    if (!from.isMoved && Math.hypot(dx, dy) < 4) return;
    drag.current = { x: event.clientX, y: event.clientY, isMoved: true };
    pan(dx, dy);
  };
  const onPointerUp = (event: PointerEvent): void => {
    if (drag.current?.isMoved === false) focus(idAt(event), false);
    drag.current = null;
  };
  useWheel(frame, newest, zoom, pan);
  return (
    <div
      ref={frame}
      class="tree-picture"
      role="application"
      aria-label="Picture of the prefix tree"
      aria-describedby="tree-keys"
      tabIndex={0}
      data-testid="tree-picture"
      onKeyDown={onKeyDown}
    >
      <canvas
        ref={canvas}
        aria-hidden="true"
        onPointerDown={(event) => {
          if (event.button !== 0) return;
          drag.current = { x: event.clientX, y: event.clientY, isMoved: false };
          event.currentTarget.setPointerCapture(event.pointerId);
        }}
        onPointerMove={onPointerMove}
        onPointerUp={onPointerUp}
        onPointerCancel={() => (drag.current = null)}
        onPointerLeave={() => props.onHover(null)}
        onDblClick={(event) => {
          const block = layout.byId.get(idAt(event) ?? -1);
          if (block !== undefined) setChosen(revealed(view, extent, block, true));
        }}
      />
      <p id="tree-keys" class="visually-hidden">
        Left and right arrow: to the prefix and to the first continuation. Up and down: to the neighbours.
        Enter: zoom to the node. Plus, minus and zero: zoom. Shift with arrows: pan. The outline has the same
        nodes as text.
      </p>
    </div>
  );

  /** Draws after each change, and again while something fades. */
  function useRedraw(
    target: RefObject<HTMLCanvasElement | null>,
    colours: RefObject<Palette | null>,
    current: { current: typeof now },
  ): void {
    const frameId = useRef(0);
    const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
    const paint = (): void => {
      frameId.current = 0;
      clearTimeout(timer.current);
      const element = target.current;
      const context = element?.getContext("2d");
      if (!element || !context || current.current.width === 0) return;
      const { tree, width: w, height: h } = current.current;
      const ratio = Math.min(globalThis.devicePixelRatio || 1, 3);
      if (element.width !== Math.round(w * ratio) || element.height !== Math.round(h * ratio)) {
        element.width = Math.round(w * ratio);
        element.height = Math.round(h * ratio);
        element.style.width = `${w}px`;
        element.style.height = `${h}px`;
      }
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      const nowS = current.current.nowS();
      const fades = !matchMedia("(prefers-reduced-motion: reduce)").matches;
      colours.current ??= paletteAt(element.parentElement ?? element);
      draw(context, colours.current, { ...current.current, nowS, fades });
      if (tree.forgetGhosts(nowS)) current.current.onGhostsGone();
      if (tree.isFading(nowS)) timer.current = setTimeout(request, FADE_MS);
    };
    const request = (): void => {
      frameId.current ||= requestAnimationFrame(paint);
    };
    useLayoutEffect(request);
    useEffect(() => {
      const repaint = (): void => {
        colours.current = null;
        request();
      };
      const scheme = matchMedia("(prefers-color-scheme: dark)");
      scheme.addEventListener("change", repaint);
      const stop = theme.subscribe(() => queueMicrotask(repaint));
      return () => {
        scheme.removeEventListener("change", repaint);
        stop();
        clearTimeout(timer.current);
        cancelAnimationFrame(frameId.current);
      };
    }, []);
  }
}

/** The wheel pans while there is something to pan, else it scrolls the page; with Ctrl (as pinching does) it zooms. */
function useWheel(
  frame: RefObject<HTMLDivElement | null>,
  newest: { readonly current: { readonly view: View; readonly extent: Extent } },
  zoom: (factor: number, x: number, y: number) => void,
  pan: (dx: number, dy: number) => void,
): void {
  const act = useRef({ zoom, pan });
  act.current = { zoom, pan };
  useEffect(() => {
    const element = frame.current;
    if (element === null) return;
    const onWheel = (event: WheelEvent): void => {
      const { view, extent } = newest.current;
      const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 18 : 1;
      if (event.ctrlKey || event.metaKey) {
        const box = element.getBoundingClientRect();
        act.current.zoom(
          Math.exp((-event.deltaY * unit) / 300),
          event.clientX - box.left,
          event.clientY - box.top - AXIS,
        );
        event.preventDefault();
        return;
      }
      const [dx, dy] = event.shiftKey ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
      const next = panned(view, extent, -dx * unit, -dy * unit);
      if (next.left === view.left && next.top === view.top) return;
      act.current.pan(-dx * unit, -dy * unit);
      event.preventDefault();
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, []);
}
