// The prefix tree of the model, live: what is in the cache, what shares it, what it saved.
import { mergeWatched } from "agentflow-client";
import { useMemo, useRef, useState } from "preact/hooks";
import { View } from "../app/View";
import { useWatch, type Watched } from "../app/watch";
import { LineChart, spanOf, type Point } from "../charts/LineChart";
import { compact, count, counted, percent } from "../charts/numbers";
import { Ring } from "../charts/ring";
import { layOut, type Scale } from "./layout";
import { Legend } from "./Legend";
import { NodeDetails } from "./NodeDetails";
import { PrefixTree, type PrefixNode } from "./prefixes";
import { addSample, savings, type Sample } from "./savings";
import { Texts, useLabels } from "./texts";
import { TreeCanvas, type PictureControls } from "./TreeCanvas";
import { TreeOutline } from "./TreeOutline";
import "./tree.css";

const nowS = (): number => performance.now() / 1000;
const SIZES = [1000, 5000] as const;

export default function TreeView() {
  const [maxNodes, setMaxNodes] = useState<number>(SIZES[0]);
  return (
    <View
      name="tree"
      title="Prefix tree"
      lead="The token cache of the model. A context reads from left to right, and each block is a stretch of tokens that is kept; a block that stands beside several others is a prefix that they share, computed once."
    >
      <LiveTree key={maxNodes} maxNodes={maxNodes} onMaxNodes={setMaxNodes} />
    </View>
  );
}

function LiveTree({ maxNodes, onMaxNodes }: { maxNodes: number; onMaxNodes: (most: number) => void }) {
  const tree = useRef(new PrefixTree()).current;
  const texts = useRef(new Texts()).current;
  const samples = useRef(new Ring<Sample>(600)).current;
  const controls = useRef<PictureControls | null>(null);
  const [version, setVersion] = useState(0);
  const [isPaused, setPaused] = useState(false);
  const [isOutline, setOutline] = useState(false);
  const [scale, setScale] = useState<Scale>("tokens");
  const [hasTexts, setHasTexts] = useState(true);
  const [focused, setFocused] = useState<number | null>(null);
  const [hovered, setHovered] = useState<number | null>(null);
  const [roomy, setRoomy] = useState<readonly number[]>([]);
  const next = (): void => setVersion((before) => before + 1);
  const missed = useRef<Watched | null>(null); // while paused

  const take = (watched: Watched): void => {
    const at = nowS();
    if (watched.tree?.reset) texts.clear();
    if (watched.tree) tree.apply(watched.tree, at);
    if (watched.stats) addSample(samples, watched.stats, at);
  };
  const problem = useWatch({ steps: false, tree: true, intervalS: 0.5, maxNodes }, (watched) => {
    if (isPaused) {
      const all = missed.current === null ? watched : mergeWatched(missed.current, watched);
      missed.current = all.tree ? { ...all, tree: tree.withoutUnknown(all.tree) } : all;
      return;
    }
    take(watched);
    next();
  });
  const pause = (): void => {
    if (missed.current !== null) take(missed.current);
    missed.current = null;
    setPaused(!isPaused);
    next();
  };

  const layout = useMemo(() => layOut(tree.root, scale), [version, scale]);
  const nodes = hasTexts ? roomy.flatMap((id) => tree.node(id) ?? []) : [];
  useLabels(texts, nodes, next);
  const nodeOf = (id: number | null): PrefixNode | null => (id === null ? null : (tree.node(id) ?? null));
  const shown = nodeOf(hovered) ?? nodeOf(focused);
  const labels = hasTexts ? texts.labels : NO_TEXTS;

  return (
    <>
      {problem && layout.rows > 0 && <p class="view-note">{problem}</p>}
      <div class="tree-bar">
        <div class="row">
          <button type="button" aria-pressed={isOutline} onClick={() => setOutline(!isOutline)}>
            Outline
          </button>
          {!isOutline && (
            <span class="row" role="group" aria-label="Zoom">
              <button type="button" aria-label="Zoom out" onClick={() => controls.current?.zoom(1 / 1.5)}>
                −
              </button>
              <button type="button" aria-label="Zoom in" onClick={() => controls.current?.zoom(1.5)}>
                +
              </button>
              <button type="button" onClick={() => controls.current?.fit()}>
                Fit
              </button>
            </span>
          )}
          <button type="button" aria-pressed={isPaused} onClick={pause}>
            {isPaused ? "Resume" : "Pause"}
          </button>
        </div>
        <div class="row">
          {!isOutline && (
            <select
              aria-label="Widths"
              value={scale}
              onChange={(event) => setScale(event.currentTarget.value as Scale)}
            >
              <option value="tokens">Width by tokens</option>
              <option value="even">Long blocks shortened</option>
            </select>
          )}
          <select
            aria-label="Nodes"
            value={maxNodes}
            onChange={(event) => onMaxNodes(Number(event.currentTarget.value))}
          >
            {SIZES.map((size) => (
              <option key={size} value={size}>
                {count(size)} nodes at most
              </option>
            ))}
          </select>
          <label class="row tree-check">
            <input
              type="checkbox"
              checked={hasTexts}
              onChange={(event) => setHasTexts(event.currentTarget.checked)}
            />
            Texts
          </label>
        </div>
      </div>
      <div class="panel tree-panel">
        {layout.rows === 0 ? (
          <p class="empty">{problem ?? "The cache is empty: run a program to see its prefixes."}</p>
        ) : isOutline ? (
          <TreeOutline
            tree={tree}
            nowS={nowS()}
            focused={focused}
            onFocus={setFocused}
            texts={labels}
            onRoom={setRoomy}
          />
        ) : (
          <TreeCanvas
            tree={tree}
            layout={layout}
            scale={scale}
            nowS={nowS}
            focused={focused}
            onFocus={setFocused}
            hovered={hovered}
            onHover={setHovered}
            texts={labels}
            controls={controls}
            onRoom={setRoomy}
            onGhostsGone={next}
          />
        )}
        <div class="tree-foot">
          <Legend version={version} />
          <p class="tree-note">
            {counted(tree.numNodes, "node")}
            {tree.numLeftOut > 0 && `, the most recently used; ${count(tree.numLeftOut)} more are not shown`}
          </p>
        </div>
      </div>
      <NodeDetails tree={tree} texts={texts} node={shown} nowS={nowS()} />
      <Savings samples={samples.toArray()} />
    </>
  );
}

const NO_TEXTS: ReadonlyMap<number, string> = new Map();

function Savings({ samples }: { samples: readonly Sample[] }) {
  const { recent, overall, saved } = savings(samples);
  const chart = { nowS: samples[samples.length - 1]?.atS ?? 0, spanS: spanOf(samples) };
  const points = (values: readonly (number | null)[]): Point[] =>
    samples.map(({ atS }, i) => ({ atS, value: values[i] ?? null }));
  return (
    <div class="charts">
      <LineChart
        {...chart}
        title="Cache hit rate"
        note="of prompt tokens"
        format={percent}
        least={1}
        series={[
          { name: "last 10 s", look: "a", points: points(recent), isArea: true },
          { name: "since the start", look: "b", points: points(overall) },
        ]}
      />
      <LineChart
        {...chart}
        title="Prompt tokens never computed"
        note="since the server started"
        format={compact}
        least={100}
        isWhole
        series={[{ name: "saved", look: "a", points: points(saved), isArea: true }]}
      />
    </div>
  );
}
