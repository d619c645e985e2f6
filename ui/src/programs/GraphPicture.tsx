// A live graph as a picture. The arrow keys move along its edges and layers.
import type { LiveGraph, LiveNode } from "agentflow-client";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Facts } from "../charts/Facts";
import { imageOf } from "../images/kept";
import { isolated } from "../runs/layout";
import { shortened } from "../text/shorten";
import { neighbour, NODE_WIDTH, type Picture, type PlacedNode } from "./picture";
import { factsOf, lineOf, nameOf, placeOf, statusOf } from "./words";

const MAX_NAME_CHARS = 22;
const GLYPHS: Readonly<Record<string, string>> = { waiting: "○", running: "▶", done: "✓", failed: "✕" };

interface Props {
  readonly graph: LiveGraph;
  readonly picture: Picture;
  readonly label: string;
  readonly session: string;
}

export function GraphPicture({ graph, picture, label, session }: Props) {
  const [focused, setFocused] = useState<number | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const frame = useRef<HTMLDivElement>(null);
  const hasFocus = useRef(false);
  const placedAt = (id: number | null): PlacedNode | undefined => picture.nodes.find(({ node }) => node.id === id);
  const current = placedAt(focused) ?? picture.nodes[0];
  const shown = placedAt(hovered) ?? placedAt(focused);
  useLayoutEffect(() => {
    if (!hasFocus.current) return;
    const node = frame.current?.querySelector<SVGGElement>('[tabindex="0"]');
    if (node !== document.activeElement) node?.focus();
  }, [current?.node.id]);
  const onKeyDown = (event: KeyboardEvent): void => {
    if (current === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = neighbour(picture, current, event.key);
    if (to === null) return;
    setFocused(to.node.id);
    setHovered(null); // the pointer may rest on another one
    event.preventDefault();
  };
  return (
    <>
      <div
        ref={frame}
        class="graph-frame"
        data-scrolls
        onKeyDown={onKeyDown}
        onFocusIn={() => (hasFocus.current = true)}
        onFocusOut={() => (hasFocus.current = false)}
      >
        <svg
          width={picture.width}
          height={picture.height}
          viewBox={`0 0 ${picture.width} ${picture.height}`}
          role="listbox"
          aria-label={label}
        >
          <g aria-hidden="true">
            {picture.groups.map((box) => (
              <g key={`${box.group} ${box.x}`} class="graph-group">
                <rect x={box.x} y={box.y} width={box.width} height={box.height} rx="10" />
                <text x={box.x + 8} y={box.y - 4}>
                  task group {box.group}
                </text>
              </g>
            ))}
            {picture.edges.map(([from, to]) => (
              <path
                key={`${from.node.id} ${to.node.id}`}
                class={`graph-edge${from === shown || to === shown ? " is-chosen" : ""}`}
                d={wayOf(from, to, picture.nodeHeight)}
              />
            ))}
          </g>
          {picture.nodes.map((placed) => (
            <Node
              key={placed.node.id}
              placed={placed}
              height={picture.nodeHeight}
              isCurrent={placed === current}
              isChosen={placed.node.id === focused}
              choose={() => setFocused(placed.node.id)}
              hover={(isOver) => setHovered(isOver ? placed.node.id : null)}
            />
          ))}
        </svg>
      </div>
      {shown === undefined ? (
        <p class="graph-hint">Point at a node, or move to one with the arrow keys, to read about it.</p>
      ) : (
        <section class="graph-details" aria-label={`Node of ${session}`}>
          <h3>
            <bdi>{nameOf(shown.node)}</bdi>
          </h3>
          <Facts facts={factsOf(shown.node, graph)} />
          <KnownImages node={shown.node} />
        </section>
      )}
    </>
  );
}

/** The images of a node whose bytes this page has, because it has sent them. */
function KnownImages({ node }: { node: LiveNode }) {
  const known = (node.media ?? []).map(({ source }) => imageOf(source)).filter((one) => one?.data !== undefined);
  if (known.length === 0) return null;
  return (
    <div class="graph-images">
      {known.map((one) => (
        <img key={one!.source} src={one!.url} alt="An image of the request" />
      ))}
    </div>
  );
}

interface NodeProps {
  readonly placed: PlacedNode;
  readonly height: number;
  readonly isCurrent: boolean;
  readonly isChosen: boolean;
  readonly choose: () => void;
  readonly hover: (isOver: boolean) => void;
}

function Node({ placed: { node, x, y }, height, isCurrent, isChosen, choose, hover }: NodeProps) {
  const name = nameOf(node);
  const place = placeOf(node);
  return (
    <g
      role="option"
      class={`graph-node is-${statusOf(node)}${isChosen ? " is-chosen" : ""}`}
      transform={`translate(${x} ${y})`}
      tabindex={isCurrent ? 0 : -1}
      aria-selected={isChosen}
      onFocus={choose}
      onClick={choose}
      onPointerEnter={() => hover(true)}
      onPointerLeave={() => hover(false)}
    >
      <rect width={NODE_WIDTH} height={height} rx="7" />
      <text class="graph-glyph" x="18" y={height / 2 + 5} aria-hidden="true">
        {GLYPHS[statusOf(node)]}
      </text>
      <text>
        <tspan class="graph-name" x="34" y="20">
          {isolated(shortened(name, MAX_NAME_CHARS))}
        </tspan>
        <tspan class="graph-comma">, </tspan>
        <tspan class="graph-line" x="34" y="36">
          {lineOf(node)}
        </tspan>
        {place && (
          <>
            <tspan class="graph-comma">, </tspan>
            <tspan class="graph-line" x="34" y="51">
              {place}
            </tspan>
          </>
        )}
      </text>
      {node.awaited && <path class="graph-mark" d={`M${NODE_WIDTH - 22} 1h12v16l-6 -5l-6 5z`} />}
    </g>
  );
}

/** From the right side of a node to the left side of another. */
function wayOf(from: PlacedNode, to: PlacedNode, height: number): string {
  const [x1, y1, x2, y2] = [from.x + NODE_WIDTH, from.y + height / 2, to.x, to.y + height / 2];
  const bend = Math.max(24, (x2 - x1) / 2);
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 5} ${y2}m-4 -4l5 4l-5 4`;
}
