// Runs one path's I/O thread: cuts spans into blocks, keeps a bounded number of bytes in flight, bounces unaligned
// bytes for direct I/O, resumes short transfers, settles requests.
//
//   callers          submit(span) ──> incoming ─┐                         request->finish(): waiters, events
//   I/O thread                    take ──> cut ──> backend.start ... backend.wait ──> settle ─┘   (one loop)
//
// The callers' threads touch `incoming` under a mutex and nothing else, so the ring and the blocks need no lock, and
// completions are reaped whether or not anybody waits for them.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "zero_nvme/backend.hpp"
#include "zero_nvme/memory.hpp"
#include "zero_nvme/request.hpp"
#include "zero_nvme/statistics.hpp"

namespace zero_nvme {

struct PathFile {
  int fd;
  bool direct;                     // opened with O_DIRECT: offsets, lengths and addresses must be aligned
  std::size_t alignment;           // of offsets and lengths, bytes
  std::size_t memory_alignment;    // of addresses, bytes
};

struct Limits {
  std::size_t block_bytes;     // largest transfer
  std::size_t inflight_bytes;  // most bytes in flight; one block is always allowed
  unsigned depth;              // most transfers in flight
};

// A contiguous piece of one request on one path.
struct Span {
  std::shared_ptr<Request> request;
  Op op;
  char* memory;
  std::uint64_t offset;
  std::size_t nbytes;
};

// One transfer in flight, and the caller's bytes that ride on it.
struct Block : Transfer {
  std::shared_ptr<Request> request;
  char* user = nullptr;  // the caller's memory
  std::size_t user_nbytes = 0;
  char* base = nullptr;  // memory of the transfer: the caller's, or the bounce buffer
  std::uint64_t base_offset = 0;
  std::size_t base_nbytes = 0;
  std::size_t head = 0;    // bytes of the bounce before the caller's
  std::size_t needed = 0;  // bytes from base on that must move: a file may end inside the last page of a read
  std::size_t moved = 0;
  bool bounced = false;
  bool filling = false;  // reading the page that a write changes in part
  bool partial = false;  // holds a lock on its page
  unsigned attempts = 0;
  std::chrono::steady_clock::time_point started;
  Bounce bounce;
};

class PathQueue {
 public:
  PathQueue(std::uint32_t index, PathFile file, std::unique_ptr<Backend> backend, Limits limits);
  ~PathQueue();  // settles everything first
  PathQueue(const PathQueue&) = delete;
  PathQueue& operator=(const PathQueue&) = delete;

  void submit(Span span);                // from any thread
  void submit(std::vector<Span> spans);  // from any thread
  const Statistics& statistics() const noexcept { return statistics_; }
  const Backend& backend() const noexcept { return *backend_; }
  void close_in_child() noexcept { backend_->close_in_child(); }

 private:
  void run();
  bool take_incoming();
  template <typename Change>
  void tell(Change&& change);
  void issue();
  bool issue_from(Op op);
  std::unique_ptr<Block> take_block();
  void put_back(std::unique_ptr<Block> block);
  bool cut(Span& span, Block& block);
  void launch(std::unique_ptr<Block> block);
  void advance(Block& block);
  void settle(const Completion& completion);
  void filled(Block& block);
  void finish(Block* block, int error, std::size_t got);

  const std::uint32_t index_;
  const PathFile file_;
  const Limits limits_;
  const std::unique_ptr<Backend> backend_;
  Statistics statistics_;

  std::mutex mutex_;  // guards the next three
  std::vector<Span> incoming_;
  bool stopping_ = false;
  bool told_ = false;  // the I/O thread was woken since it last looked: a burst of requests costs one wake

  // The I/O thread's own.
  std::deque<Span> pending_[2];       // by Op
  std::size_t bytes_in_flight_[2]{};  // by Op
  unsigned blocks_in_flight_ = 0;
  std::set<std::uint64_t> locked_pages_;  // being read, changed and written back
  std::vector<std::unique_ptr<Block>> spare_;
  std::size_t spare_bounce_bytes_ = 0;  // at most inflight_bytes: mapping them again costs more than the copy
  std::thread thread_;
};

}  // namespace zero_nvme
