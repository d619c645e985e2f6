// What the blocks of the picture mean, drawn as the picture draws them.
import { useLayoutEffect, useRef } from "preact/hooks";
import { theme } from "../app/theme";
import { drawBlock, paletteAt, type Look } from "./palette";

const PLAIN: Look = { isInUse: false, hit: 0, ghost: null, generated: 0 };
const ENTRIES: readonly (readonly [look: Look, text: string])[] = [
  [{ ...PLAIN, isInUse: true }, "in use by running requests"],
  [PLAIN, "cached"],
  [{ ...PLAIN, hit: 1 }, "just hit"],
  [{ ...PLAIN, ghost: 1 }, "just evicted"],
  [{ ...PLAIN, generated: 1 }, "generated tokens"],
];

/** `version`: drawn again when it changes. */
export function Legend({ version }: { version: number }) {
  return (
    <ul class="tree-legend">
      {ENTRIES.map(([look, text]) => (
        <li key={text}>
          <Swatch look={look} version={version} />
          {text}
        </li>
      ))}
    </ul>
  );
}

function Swatch({ look, version }: { look: Look; version: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const drawn = useRef("");
  useLayoutEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context) return;
    const palette = paletteAt(element.parentElement ?? element);
    const key = JSON.stringify(palette);
    if (drawn.current === key) return;
    drawn.current = key;
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, 28, 16);
    drawBlock(context, palette, look, { x: 1, y: 1, width: 26, height: 14 }, { width: 28, height: 16 });
  }, [version, theme.value]);
  return <canvas ref={canvas} width={56} height={32} aria-hidden="true" />;
}
