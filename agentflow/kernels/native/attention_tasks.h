// Divides the attention of a batch into tasks: some query rows over one run of slots.
//
// Requests with a common prefix of slots form a prefix tree. A run that several requests share becomes one task for all
// of their rows, so that it is read once (Hydragen, arXiv 2402.05099; cascade attention of FlashInfer, arXiv
// 2501.01005), if that saves more than storing and merging partial results costs. Only requests with few rows share
// runs: the rows of a long chunk read their keys together in any case. Long tasks are divided along their keys, to occupy
// all threads. A row's partial results from several tasks are merged by log-sum-exp.
//
// A row's result does not depend on the division of its keys, to the last bit: the sums of blocks of KEY_BLOCK keys are
// added as the nodes of a binary tree over the blocks (pairwise summation: Higham 1993, SIAM Journal on Scientific Computing
// 14). A task starts at a block boundary and produces the sums of the largest nodes within it. Rows that share only the first
// keys of a block get a separate task, which packs these keys once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "simd.h"

namespace agentflow {

// Like inputs.AttentionBatch: R requests, then G trees, each below a prefix.
struct Batch {
    const int32_t* page_table;  // the slots of all requests, row by row
    int64_t page_stride;  // entries between the starts of two rows of the table
    int64_t num_requests;
    const int64_t *page_rows, *query_lens, *kv_lens;  // [R]
    int64_t num_trees;
    const int64_t *tree_page_rows, *prefix_lens, *tree_query_lens;  // [G]
    const int64_t* paths;  // [rows of all trees][path_stride]
    int64_t path_stride;
    const int64_t* path_lens;  // [rows of all trees]
    const uint8_t* both_ways;  // [R]: the request's rows attend to each other, even to later rows; null: no rows do
};

// The attention of some rows over a run of slots. Row i of the task is Plan::rows[first_row + i]. Its partial results start at
// Plan::parts[first_row + i]; -1: the task's output is the row's result.
struct Task {
    const int32_t* slots;         // [num_keys]
    int32_t num_keys, seen;       // row i attends to the first `seen + i` keys, or to all if there are fewer
    int32_t from;                 // row i attends to no keys before `from + i`, or, if `seen` is ALL, before `from`
    int32_t num_rows, first_row;  // `first_row`: in Plan::rows
    int32_t first_head, end_head; // KV heads
    int32_t first_block;          // the index of the first block among the blocks of the rows' keys
    int32_t num_shared = 0, first_own = 0;  // row i has the keys Plan::own[first_own + i]; the first num_shared are `slots`
};

// The keys of a row in a block whose first keys it shares: the row attends to the first `seen` of slots[0 .. num_keys).
struct OwnBlock {
    const int32_t* slots;
    int32_t num_keys, seen;
};

// A node of the binary tree over a row's blocks: 2^level blocks from `first` on; `first` is a multiple of 2^level.
struct Node {
    int32_t first, level;

    // Whether this node and `before` are the children of one node.
    bool follows(const Node& before) const { return level == before.level && (first >> level) % 2 == 1 && before.first + (1 << level) == first; }
};

// Calls body(node) for the largest nodes within blocks `first` to `end` (exclusive), in order.
template <class Body>
void each_node(int32_t first, int32_t end, const Body& body) {
    while (first < end) {
        int32_t level = std::bit_width(uint32_t(end - first)) - 1;
        if (first > 0) level = std::min(level, __builtin_ctz(uint32_t(first)));
        body(Node{first, level});
        first += 1 << level;
    }
}

struct HeadShape {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t group() const { return num_heads / num_kv_heads; }
};

constexpr int KEY_BLOCK = 128;      // the keys in a block
constexpr int PATH_BLOCK = 1 << 20; // the first block of a path, whose sums are added to its prefix's last
constexpr int BLOCK_VALUES = 1 << 16;  // the numbers in the keys and values of a block: the cache has room for two such blocks
constexpr int MAX_QUERIES = 192;    // the queries of a task: query rows times query heads per KV head
constexpr int FEW_ROWS = 16;        // requests with at most this many rows share prefixes
constexpr int MIN_SPLIT_KEYS = 128;
constexpr int ALL = 1 << 30;
constexpr int NO_WINDOW = -ALL;     // as Task::from
// The cost of a partial result, in keys: for each row, to store and merge it, and for each task.
constexpr int KEYS_PER_PART = 8;
constexpr int KEYS_PER_TASK = 32;

class Plan {
  public:
    std::vector<Task> tasks;
    std::vector<int32_t> rows;         // rows of the batch, task after task
    std::vector<int32_t> parts;        // for each entry of `rows`: its first partial result, or -1
    std::vector<Node> nodes;           // the node of each partial result
    std::vector<OwnBlock> own;         // the keys of each row in tasks that share the first keys of a block
    std::vector<int32_t> first_parts;  // [T + 1]: row t has the parts first_parts[t] to first_parts[t + 1], in order
    std::vector<int32_t> merged_rows;  // rows with several parts
    int32_t num_parts = 0;

    // `window`: the number of keys to which a row attends, including its own; 0: all. With a window, no runs are shared, because
    // few rows attend to the same keys.
    Plan(const Batch& batch, const HeadShape& shape, int num_threads, int64_t window = 0)
        : batch_(batch), shape_(shape), num_threads_(num_threads), window_(int32_t(std::min<int64_t>(window, ALL))) {
        add_readers();
        if (!window_) share(few_, 0);
        for (const Reader& reader : readers_) add_tail(reader);
        add_paths();
        split();
        number_parts();
    }

    int32_t num_rows() const { return num_rows_; }

  private:
    // A request, or a tree's rows with the tree's prefix.
    struct Reader {
        const int32_t* slots;
        int32_t limit;   // the number of keys that were cached before this batch, and can be shared
        int32_t end;     // the number of keys
        int32_t first_row, num_rows;
        bool sees_all;   // each row attends to all keys
        int32_t start = 0;  // the first key that is not in a shared run

        bool is_tree() const { return limit == end; }
    };

    void add_readers() {
        for (int64_t r = 0; r < batch_.num_requests; r++) {
            const int32_t end = int32_t(batch_.kv_lens[r]), num = int32_t(batch_.query_lens[r]);
            const bool sees_all = batch_.both_ways && batch_.both_ways[r];
            add_reader({slots_of(batch_.page_rows[r]), end - num, end, num_rows_, num, sees_all}, num <= FEW_ROWS);
        }
        num_request_rows_ = num_rows_;
        for (int64_t g = 0; g < batch_.num_trees; g++) {
            const int32_t end = int32_t(batch_.prefix_lens[g]), num = int32_t(batch_.tree_query_lens[g]);
            add_reader({slots_of(batch_.tree_page_rows[g]), end, end, num_rows_, num, true}, true);
        }
    }

    void add_reader(const Reader& reader, bool shares) {
        if (shares && reader.limit > 0) few_.push_back(int32_t(readers_.size()));
        readers_.push_back(reader);
        num_rows_ += reader.num_rows;
    }

    const int32_t* slots_of(int64_t page_row) const {
        return batch_.page_table + page_row * batch_.page_stride;
    }

    // Finds the runs that `members` share after `depth`. Their keys up to `depth` are equal.
    void share(std::vector<int32_t> members, int32_t depth) {
        std::erase_if(members, [&](int32_t m) { return readers_[m].limit <= depth; });
        std::stable_sort(members.begin(), members.end(), [&](int32_t a, int32_t b) {
            return readers_[a].slots[depth] < readers_[b].slots[depth];
        });
        for (size_t first = 0, end = 0; first < members.size(); first = end) {
            const int32_t slot = readers_[members[first]].slots[depth];
            while (end < members.size() && readers_[members[end]].slots[depth] == slot) end++;
            if (end - first < 2) continue;
            const std::vector<int32_t> siblings(members.begin() + first, members.begin() + end);
            const int32_t common = common_end(siblings, depth);
            const int32_t start = readers_[siblings[0]].start, shared_end = common / KEY_BLOCK * KEY_BLOCK;
            const int32_t length = shared_end - start;
            int32_t rows = 0;
            for (int32_t m : siblings) rows += readers_[m].num_rows;
            const int64_t saved = int64_t(siblings.size() - 1) * length;
            if (saved > KEYS_PER_TASK + int64_t(rows) * KEYS_PER_PART) {
                std::vector<int32_t> all_rows;
                for (int32_t m : siblings) {
                    add_range(all_rows, readers_[m].first_row, readers_[m].num_rows);
                    readers_[m].start = shared_end;
                }
                add_tasks({readers_[siblings[0]].slots + start, length}, start / KEY_BLOCK, all_rows);
            }
            share(siblings, common);
            share_block(siblings, shared_end, (common - shared_end) / LANES * LANES);
        }
    }

    // Makes the `siblings` whose runs end at `start` share the first `num` keys of the block that starts there.
    void share_block(std::vector<int32_t> siblings, int32_t start, int32_t num) {
        std::erase_if(siblings, [&](int32_t m) { return readers_[m].start != start; });
        int32_t num_rows = 0;
        for (int32_t m : siblings) num_rows += readers_[m].num_rows;
        if (int64_t(siblings.size() - 1) * num <= KEYS_PER_TASK + int64_t(num_rows) * KEYS_PER_PART) return;
        std::vector<int32_t> all_rows;
        const int32_t first_own = int32_t(own.size());
        for (int32_t m : siblings) {
            Reader& reader = readers_[m];
            const int32_t num_keys = std::min(KEY_BLOCK, reader.end - start);
            add_range(all_rows, reader.first_row, reader.num_rows);
            for (int32_t i = 0; i < reader.num_rows; i++) {
                const int32_t seen = reader.sees_all ? num_keys : std::min(num_keys, reader.limit - start + 1 + i);
                own.push_back({reader.slots + start, num_keys, seen});
            }
            reader.start = start + num_keys;
        }
        add_tasks({own[first_own].slots, own[first_own].num_keys}, start / KEY_BLOCK, all_rows, num, first_own);
    }

    int32_t common_end(const std::vector<int32_t>& siblings, int32_t depth) const {
        const Reader& one = readers_[siblings[0]];
        int32_t end = one.limit;
        for (int32_t m : siblings) {
            const Reader& other = readers_[m];
            end = std::min(end, other.limit);
            end = int32_t(std::mismatch(one.slots + depth, one.slots + end, other.slots + depth).first - one.slots);
        }
        return end;
    }

    void add_tail(const Reader& reader) {
        const int32_t length = reader.end - reader.start;
        if (length == 0) return;
        if (window_ && reader.is_tree()) return add_prefix_windows(reader);
        std::vector<int32_t> all_rows;
        add_range(all_rows, reader.first_row, reader.num_rows);
        const int32_t before = reader.limit - reader.start + 1;  // the keys up to the first row's own
        const int32_t seen = reader.is_tree() ? ALL : reader.sees_all ? length : before;
        add_tasks({reader.slots + reader.start, length, seen, window_start(before)}, reader.start / KEY_BLOCK, all_rows);
    }

    // The first key to which a row attends that has `seen` keys up to its own.
    int32_t window_start(int32_t seen) const { return window_ ? seen - window_ : NO_WINDOW; }

    // Adds tasks for the parts of a tree's prefix that are in the windows of its rows: one for all rows with the same depth.
    void add_prefix_windows(const Reader& reader) {
        std::map<int64_t, std::vector<int32_t>> rows_of;  // by the lengths of their paths
        const int32_t first_path = reader.first_row - num_request_rows_;
        for (int32_t i = 0; i < reader.num_rows; i++) rows_of[batch_.path_lens[first_path + i]].push_back(reader.first_row + i);
        for (const auto& [length, all_rows] : rows_of) {
            add_tasks({reader.slots, reader.end, ALL, window_start(reader.end + int32_t(length))}, 0, all_rows);
        }
    }

    // Adds a task for each row of a tree, over its ancestors and itself.
    void add_paths() {
        if (batch_.num_trees == 0) return;
        int32_t row = num_request_rows_, num_slots = 0;
        const int32_t num_paths = num_rows_ - row;
        for (int32_t b = 0; b < num_paths; b++) num_slots += int32_t(batch_.path_lens[b]);
        path_slots_.reserve(num_slots);
        for (int32_t b = 0; b < num_paths; b++, row++) {
            const int64_t* path = batch_.paths + b * batch_.path_stride;
            const size_t first = path_slots_.size();
            path_slots_.insert(path_slots_.end(), path, path + batch_.path_lens[b]);
            const int32_t length = int32_t(batch_.path_lens[b]);
            add_tasks({path_slots_.data() + first, length, ALL, window_start(length)}, PATH_BLOCK, {row});
        }
    }

    static void add_range(std::vector<int32_t>& rows, int32_t first, int32_t num) {
        for (int32_t i = 0; i < num; i++) rows.push_back(first + i);
    }

    // A run of keys for some rows; the fields are as in Task.
    struct Run {
        const int32_t* slots;
        int32_t num_keys, seen = ALL, from = NO_WINDOW;
    };

    // Adds tasks of at most MAX_QUERIES queries over the blocks with keys to which their rows attend. If there are many queries,
    // each KV head gets a separate task.
    void add_tasks(const Run& run, int32_t first_block, const std::vector<int32_t>& all_rows, int32_t num_shared = 0,
                   int32_t first_own = 0) {
        const int32_t num = int32_t(all_rows.size()), group = int32_t(shape_.group());
        const int32_t most = std::max(1, MAX_QUERIES / group), num_blocks = (num + most - 1) / most;
        const int32_t heads = int32_t(shape_.num_kv_heads);
        // If the runs are too few and too short to occupy all threads, they are divided further, by heads.
        const int64_t num_pieces = int64_t(readers_.size()) * std::max(run.num_keys / MIN_SPLIT_KEYS, 1);
        const int64_t for_threads = num_threads_ == 1 ? heads : std::max<int64_t>(heads * num_pieces / (2 * num_threads_), 1);
        const int64_t for_cache = std::max<int64_t>(BLOCK_VALUES / (KEY_BLOCK * 2 * shape_.head_dim), 1);
        const int32_t most_heads = int32_t(std::min(for_cache, for_threads));
        for (int32_t block = 0; block < num_blocks; block++) {
            const int32_t first = num * block / num_blocks, end = num * (block + 1) / num_blocks;
            const int32_t moved = run.seen == ALL ? 0 : first;  // how many keys later than the run's first row, row `first` is
            Task task{run.slots, run.num_keys, run.seen == ALL ? ALL : run.seen + moved, run.from + moved, end - first,
                      int32_t(rows.size()), 0, heads, first_block, num_shared, first_own + first};
            if (run.seen != ALL) task.num_keys = std::min(run.num_keys, task.seen + task.num_rows - 1);
            drop_first_keys(task, std::max(task.from, 0) / KEY_BLOCK * KEY_BLOCK);
            if (task.num_keys <= 0) continue;
            rows.insert(rows.end(), all_rows.begin() + first, all_rows.begin() + end);
            const int32_t step = (end - first) * group >= MAX_QUERIES / 8 ? 1 : most_heads;
            for (task.first_head = 0; task.first_head < heads; task.first_head += step) {
                task.end_head = std::min(heads, task.first_head + step);
                tasks.push_back(task);
            }
        }
    }

    // Drops the first `num` keys, a number of whole blocks.
    static void drop_first_keys(Task& task, int32_t num) {
        task.slots += num;
        task.num_keys -= num;
        task.first_block += num / KEY_BLOCK;
        task.from -= num;
        if (task.seen != ALL) task.seen -= num;
    }

    int64_t cost(const Task& task) const {
        const int64_t queries = task.num_rows * shape_.group();
        return int64_t(task.num_keys + KEYS_PER_TASK) * (task.end_head - task.first_head) * (12 + queries);
    }

    // Divides tasks that are so long that other threads would wait for them, and sorts all tasks by cost, the highest first.
    void split() {
        int64_t total = 0;
        for (const Task& task : tasks) total += cost(task);
        const int64_t most = total / (4 * num_threads_) + 1;
        std::vector<Task> cut;
        cut.reserve(tasks.size() + 4 * num_threads_);
        for (Task& task : tasks) {
            const int64_t wanted = num_threads_ == 1 ? 1 : (cost(task) + most - 1) / most;
            const int64_t pieces = std::clamp<int64_t>(task.num_keys / MIN_SPLIT_KEYS, 1, wanted);
            const int32_t num_blocks = blocks_of(task);
            const int32_t rows_at = task.first_row;
            for (int64_t i = 0; i < pieces; i++) {
                const int32_t first = int32_t(num_blocks * i / pieces) * KEY_BLOCK;
                const int32_t end = std::min<int32_t>(task.num_keys, int32_t(num_blocks * (i + 1) / pieces) * KEY_BLOCK);
                Task piece = task;
                piece.num_keys = end;
                drop_first_keys(piece, first);
                // Tasks for other heads of the same rows share entries of `rows`; each piece needs separate entries.
                if (i > 0) piece.first_row = copy_rows(rows_at, task.num_rows, i);
                cut.push_back(piece);
            }
        }
        tasks = std::move(cut);
        std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    }

    // Tasks for other heads of the same rows are divided alike, so their pieces i share one copy.
    int32_t copy_rows(int32_t from, int32_t num, int64_t piece) {
        for (const Copy& copy : copies_) {
            if (copy.from == from && copy.piece == piece) return copy.to;
        }
        const int32_t to = int32_t(rows.size());
        for (int32_t i = 0; i < num; i++) rows.push_back(rows[from + i]);
        if (!copies_.empty() && copies_.back().from != from) copies_.clear();
        copies_.push_back({from, to, piece});
        return to;
    }

    static int32_t blocks_of(const Task& task) { return (task.num_keys + KEY_BLOCK - 1) / KEY_BLOCK; }

    // Numbers the parts of rows with several tasks: one for each node of these tasks, in order.
    void number_parts() {
        struct Range {
            int32_t first = 0, end = 0;
        };
        std::vector<Range> ranges(rows.size());  // the blocks of each entry of `rows`
        for (const Task& task : tasks) {
            for (int32_t i = 0; i < task.num_rows; i++) ranges[task.first_row + i] = {task.first_block, task.first_block + blocks_of(task)};
        }
        std::vector<int32_t> first_entries(num_rows_ + 1), entries(rows.size());
        for (int32_t row : rows) first_entries[row + 1]++;
        for (int32_t row = 0; row < num_rows_; row++) first_entries[row + 1] += first_entries[row];
        std::vector<int32_t> next(first_entries.begin(), first_entries.end() - 1);
        for (int32_t entry = 0; entry < int32_t(rows.size()); entry++) entries[next[rows[entry]]++] = entry;
        parts.assign(rows.size(), -1);
        first_parts.assign(num_rows_ + 1, 0);
        for (int32_t row = 0; row < num_rows_; row++) {
            const auto begin = entries.begin() + first_entries[row], end = entries.begin() + first_entries[row + 1];
            if (end - begin > 1) {
                merged_rows.push_back(row);
                std::sort(begin, end, [&](int32_t a, int32_t b) { return ranges[a].first < ranges[b].first; });
                for (auto at = begin; at < end; at++) {
                    parts[*at] = int32_t(nodes.size());
                    each_node(ranges[*at].first, ranges[*at].end, [&](Node node) { nodes.push_back(node); });
                }
            }
            first_parts[row + 1] = int32_t(nodes.size());
        }
        num_parts = int32_t(nodes.size());
    }

    struct Copy {
        int32_t from, to;
        int64_t piece;
    };

    Batch batch_;
    HeadShape shape_;
    int num_threads_;
    std::vector<Reader> readers_;
    std::vector<int32_t> few_;
    std::vector<int32_t> path_slots_;
    std::vector<Copy> copies_;
    int32_t window_, num_rows_ = 0, num_request_rows_ = 0;
};

}  // namespace agentflow
