#include "zero_nvme/path_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace zero_nvme {
namespace {

constexpr unsigned kMaxAttempts = 1000;  // of one block, without a byte of progress

std::uint64_t address_of(const char* p) { return reinterpret_cast<std::uintptr_t>(p); }

}  // namespace

PathQueue::PathQueue(std::uint32_t index, PathFile file, std::unique_ptr<Backend> backend, Limits limits)
    : index_(index), file_(file), limits_(limits), backend_(std::move(backend)) {
  thread_ = std::thread([this] { run(); });
}

PathQueue::~PathQueue() {
  tell([&] { stopping_ = true; });
  thread_.join();
}

void PathQueue::submit(Span span) {
  tell([&] { incoming_.push_back(std::move(span)); });
}

void PathQueue::submit(std::vector<Span> spans) {
  tell([&] {
    incoming_.insert(incoming_.end(), std::make_move_iterator(spans.begin()), std::make_move_iterator(spans.end()));
  });
}

// Applies a change to the I/O thread's input, and wakes the thread unless it was woken since it last looked.
template <typename Change>
void PathQueue::tell(Change&& change) {
  bool told;
  {
    std::lock_guard lock(mutex_);
    change();
    told = std::exchange(told_, true);
  }
  if (!told) backend_->wake();
}

void PathQueue::run() {
  leave_signals_to_others();
  backend_->begin();
  std::vector<Completion> completed;
  for (;;) {
    const bool stopping = take_incoming();
    issue();
    if (stopping && blocks_in_flight_ == 0 && pending_[0].empty() && pending_[1].empty()) break;
    completed.clear();
    backend_->wait(completed);
    for (const Completion& completion : completed) settle(completion);
  }
  backend_->end();
}

bool PathQueue::take_incoming() {
  std::vector<Span> spans;
  bool stopping;
  {
    std::lock_guard lock(mutex_);
    spans.swap(incoming_);
    stopping = stopping_;
    told_ = false;
  }
  for (auto& span : spans) pending_[static_cast<int>(span.op)].push_back(std::move(span));
  return stopping;
}

// Reads and writes take turns by bytes in flight, so that neither queues behind all of the other.
void PathQueue::issue() {
  for (;;) {
    const Op first = bytes_in_flight_[0] <= bytes_in_flight_[1] ? Op::read : Op::write;
    if (!issue_from(first) && !issue_from(first == Op::read ? Op::write : Op::read)) return;
  }
}

// Starts one block of the oldest span. False: nothing pending, no room, or its page is locked.
bool PathQueue::issue_from(Op op) {
  auto& queue = pending_[static_cast<int>(op)];
  while (!queue.empty() && queue.front().request->dropped()) {
    queue.front().request->skip(queue.front().nbytes);
    queue.pop_front();
  }
  if (queue.empty() || blocks_in_flight_ >= limits_.depth) return false;
  Span& span = queue.front();
  const std::size_t in_flight = bytes_in_flight_[0] + bytes_in_flight_[1];
  if (in_flight > 0 && in_flight + std::min(span.nbytes, limits_.block_bytes) > limits_.inflight_bytes) return false;
  auto block = take_block();
  if (!cut(span, *block)) {
    put_back(std::move(block));
    return false;
  }
  if (span.nbytes == 0) queue.pop_front();
  launch(std::move(block));
  return true;
}

std::unique_ptr<Block> PathQueue::take_block() {
  if (spare_.empty()) return std::make_unique<Block>();
  auto block = std::move(spare_.back());
  spare_.pop_back();
  spare_bounce_bytes_ -= block->bounce.capacity();
  return block;
}

void PathQueue::put_back(std::unique_ptr<Block> block) {
  if (spare_bounce_bytes_ + block->bounce.capacity() > limits_.inflight_bytes) block->bounce.release();
  spare_bounce_bytes_ += block->bounce.capacity();
  spare_.push_back(std::move(block));
}

// Takes the next block off the front of the span. False, and nothing taken: the page it changes is locked.
//
//   offset:   |....prefix|aligned middle, straight from the caller's memory|suffix....|
//
// A prefix and a suffix bounce through one page. Where the caller's address is not aligned with the offset, every
// block bounces; a write still has its partial pages in blocks of their own, which are read, changed, written.
bool PathQueue::cut(Span& span, Block& block) {
  const std::size_t unit = file_.alignment;
  const std::uint64_t skew = span.offset % unit;
  const bool aligned_memory = address_of(span.memory) % file_.memory_alignment == 0;
  std::size_t take = std::min(span.nbytes, limits_.block_bytes);
  bool bounced = false;
  bool partial = false;
  if (file_.direct) {
    const bool congruent = address_of(span.memory + (unit - skew) % unit) % file_.memory_alignment == 0;
    const bool single_page = span.op == Op::write || congruent;
    if (skew != 0) {
      take = std::min<std::size_t>(span.nbytes, single_page ? unit - skew : limits_.block_bytes - skew);
      partial = bounced = true;
    } else if (span.nbytes >= unit) {
      take = round_down(take, unit);
      bounced = !aligned_memory;
    } else {
      partial = bounced = true;
    }
  }
  const std::uint64_t page = round_down(span.offset, unit);
  partial = partial && span.op == Op::write;
  if (partial && !locked_pages_.insert(page).second) return false;

  block.request = span.request;
  block.op = span.op;
  block.user = span.memory;
  block.user_nbytes = take;
  block.bounced = bounced;
  block.partial = block.filling = partial;
  block.head = bounced ? skew : 0;
  block.base_offset = span.offset - block.head;
  block.base_nbytes = bounced ? round_up(block.head + take, unit) : take;
  block.needed = block.op == Op::read ? block.head + take : block.base_nbytes;
  block.moved = 0;
  block.attempts = 0;
  span.memory += take;
  span.offset += take;
  span.nbytes -= take;
  return true;
}

void PathQueue::launch(std::unique_ptr<Block> owned) {
  Block* block = owned.release();  // finish() takes it back
  const int op = static_cast<int>(block->op);
  ++blocks_in_flight_;
  bytes_in_flight_[op] += block->base_nbytes;
  statistics_.depth.add(blocks_in_flight_);
  block->started = std::chrono::steady_clock::now();
  block->base = block->user;
  if (block->bounced) {
    block->base = block->bounce.take(block->base_nbytes, file_.alignment);
    if (block->base == nullptr) {
      finish(block, ENOMEM, 0);
      return;
    }
    if (block->op == Op::write && !block->filling) std::memcpy(block->base, block->user, block->user_nbytes);
  }
  block->fd = file_.fd;
  advance(*block);
}

// Hands the block's remaining bytes to the backend.
void PathQueue::advance(Block& block) {
  Transfer& transfer = block;
  transfer.op = block.filling ? Op::read : block.op;
  transfer.address = block.base + block.moved;
  transfer.nbytes = block.base_nbytes - block.moved;
  transfer.offset = block.base_offset + block.moved;
  backend_->start(&block);
}

void PathQueue::settle(const Completion& completion) {
  Block* block = static_cast<Block*>(completion.transfer);
  const std::int64_t result = completion.result;
  auto& direction = statistics_.direction[block->partial ? 1 : static_cast<int>(block->op)];
  if (result < 0) {
    const int code = static_cast<int>(-result);
    if ((code == EINTR || code == EAGAIN) && ++block->attempts < kMaxAttempts) {
      ++direction.retries;
      return advance(*block);
    }
    return finish(block, code, block->moved);
  }
  const std::size_t arrived = block->moved + static_cast<std::size_t>(result);
  if (block->filling) {
    // A short page is the end of the file, once it has been short twice.
    if (result > 0 && arrived < block->base_nbytes && ++block->attempts < 2) return advance(*block);
    block->attempts = 0;
    std::memset(block->base + arrived, 0, block->base_nbytes - arrived);  // past the end of the file
    return filled(*block);
  }
  if (arrived >= block->needed) return finish(block, 0, arrived);
  // Short. Direct I/O goes on from an aligned place, so the last part of a page may come twice.
  const std::size_t resumed = file_.direct ? round_down(arrived, file_.alignment) : arrived;
  if (resumed == block->moved && (result == 0 || ++block->attempts > 1)) {
    return finish(block, block->op == Op::read ? ENODATA : EIO, arrived);
  }
  if (resumed > block->moved) block->attempts = 0;
  block->moved = resumed;
  ++direction.retries;
  advance(*block);
}

// The page is here: change the caller's part of it, write it back.
void PathQueue::filled(Block& block) {
  std::memcpy(block.base + block.head, block.user, block.user_nbytes);
  block.filling = false;
  block.op = Op::write;
  block.moved = 0;
  advance(block);
}

void PathQueue::finish(Block* raw, int error, std::size_t got) {
  std::unique_ptr<Block> block(raw);
  const int op = block->partial ? 1 : static_cast<int>(block->op);
  auto& direction = statistics_.direction[op];
  --blocks_in_flight_;
  bytes_in_flight_[op] -= block->base_nbytes;
  if (block->partial) locked_pages_.erase(block->base_offset);
  if (error == 0) {
    if (block->bounced && op == 0) std::memcpy(block->user, block->base + block->head, block->user_nbytes);
    const auto elapsed = std::chrono::steady_clock::now() - block->started;
    direction.latency_nanoseconds.add(
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count()));
    direction.bytes += block->user_nbytes;
    if (block->bounced) direction.bounced_bytes += block->user_nbytes;
    ++direction.blocks;
  } else {
    ++direction.failures;
    block->request->fail({error, index_, block->base_offset, block->base_nbytes, got});
  }
  auto request = std::move(block->request);
  const std::size_t nbytes = block->user_nbytes;
  put_back(std::move(block));
  request->finish(nbytes);
}

}  // namespace zero_nvme
