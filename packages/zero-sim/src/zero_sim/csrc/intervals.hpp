// A map from ranges of addresses to values. Owns splitting, and joining of neighbours that became equal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace sim {

template <class Value>
class IntervalMap {
 public:
  // Calls edit(value, begin, end) for every piece of [begin, end). Bytes that had no value start with Value{}.
  template <class Edit>
  void update(uintptr_t begin, uintptr_t end, Edit&& edit) {
    if (begin >= end) return;
    auto it = cut(begin);
    cut(end);
    const auto first = begin;
    for (auto at = begin; at < end; ++it) {
      if (it == pieces_.end() || it->first > at) {
        auto until = it == pieces_.end() ? end : std::min(end, it->first);
        it = pieces_.emplace_hint(it, at, Piece{until, Value{}});
      }
      edit(it->second.value, at, it->second.end);
      at = it->second.end;
    }
    join(first, end);
  }

  // Calls keep(value) for every piece of [begin, end) that has a value, and drops those for which it returns false.
  template <class Keep>
  void filter(uintptr_t begin, uintptr_t end, Keep&& keep) {
    if (begin >= end) return;
    auto it = cut(begin);
    cut(end);
    while (it != pieces_.end() && it->first < end) it = keep(it->second.value) ? std::next(it) : pieces_.erase(it);
    join(begin, end);
  }

  void erase(uintptr_t begin, uintptr_t end) {
    filter(begin, end, [](Value&) { return false; });
  }

  const Value* find(uintptr_t at) const {
    auto it = pieces_.upper_bound(at);
    if (it == pieces_.begin()) return nullptr;
    --it;
    return at < it->second.end ? &it->second.value : nullptr;
  }

  template <class Visit>
  void each(Visit&& visit) const {
    for (auto& [begin, piece] : pieces_) visit(piece.value);
  }

  size_t size() const { return pieces_.size(); }
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    uintptr_t end;
    Value value;
  };
  using Pieces = std::map<uintptr_t, Piece>;

  // Makes `at` a border, and returns the first piece that does not lie before it.
  typename Pieces::iterator cut(uintptr_t at) {
    auto right = pieces_.lower_bound(at);
    if (right == pieces_.begin() || (right != pieces_.end() && right->first == at)) return right;
    auto left = std::prev(right);
    if (left->second.end <= at) return right;
    Piece rest{left->second.end, left->second.value};
    left->second.end = at;
    return pieces_.emplace_hint(right, at, std::move(rest));
  }

  void join(uintptr_t begin, uintptr_t end) {
    auto it = pieces_.lower_bound(begin);
    if (it != pieces_.begin()) --it;
    while (it != pieces_.end()) {
      auto next = std::next(it);
      if (next == pieces_.end() || next->first > end) return;
      if (it->second.end == next->first && it->second.value == next->second.value) {
        it->second.end = next->second.end;
        pieces_.erase(next);
      } else {
        it = next;
      }
    }
  }

  Pieces pieces_;
};

}  // namespace sim
